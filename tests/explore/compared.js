// The sizes of two pictures (PNG as base64), and how many of their colors (0 to 255) differ by more than 96: the stored
// pictures have 256 colors.
(async (sources) => {
  const [one, other] = await Promise.all(sources.map(async (source) => {
    const picture = new Image();
    picture.src = `data:image/png;base64,${source}`;
    await picture.decode();
    const context = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
    context.drawImage(picture, 0, 0);
    return context.getImageData(0, 0, picture.width, picture.height);
  }));
  const different = one.data.filter((color, at) => Math.abs(color - other.data[at]) > 96).length;
  return [one.width, one.height, other.width, other.height, different];
})
