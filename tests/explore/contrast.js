// The texts whose contrast with what is behind them is under 4.5, as WCAG 2.2 counts it (success criterion 1.4.3).
(() => {
  const known = new Map(), canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const parsed = (text) => {
    if (!known.has(text)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, under) => [0, 1, 2].map((c) => top[c] * top[3] + under[c] * (1 - top[3])).concat(1);
  const light = (colour) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + 0.05) / (y + 0.05); };
  const faults = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!words || !box.width || element.closest(".unseen, .skip, option, svg, script, noscript") || element.disabled) continue;
    const behind = [];
    for (let each = element; each; each = each.parentElement) behind.unshift(each);
    let ground = [255, 255, 255, 1];
    for (const each of behind) {
      const style = getComputedStyle(each);
      ground = over(parsed(style.backgroundColor), ground);
      const fill = style.getPropertyValue("--fill");
      if (fill && each.classList.contains("chip") && style.getPropertyValue("--full") !== "0%") {
        const probe = document.createElement("i"); probe.style.color = fill; each.append(probe);
        ground = parsed(getComputedStyle(probe).color); probe.remove();
      }
    }
    const found = ratio(over(parsed(getComputedStyle(element).color), ground), ground);
    if (found < 4.5) faults.push(`${element.tagName}.${element.className} ${found.toFixed(2)} ${element.textContent.slice(0, 30)}`);
  }
  return faults;
})()
