// What tests ask a live page's thread beside what the page asks.
Object.assign(Machine.prototype, {
  async logits({ ids, switches }, pause) {
    const reading = await this.reading("logits", switches).read(ids, pause, false);
    return { logits: ids.map((_, place) => [...reading.logitsAt(place)]) };
  },
  async encoded({ text }) {
    return { ids: this.encode(text) };
  },
  async decode({ ids }) {
    return { text: this.tokenizer.decode(ids) };
  },
});
