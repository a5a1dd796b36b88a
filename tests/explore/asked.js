// What tests ask a live page's thread beside what the page asks.
const CALLED = {
  halves, linear, largest, distribution,
  gelu: (values) => values.map(gelu),
  argmax: (values) => [argmax(values)],
  drawn: (values, random) => [drawn(values, random)],
  turned: (values, position) => {
    const x = Float32Array.from(values);
    rotate(x, 1, x.length, position, machine.llama.angles, compiled({}, machine.config));
    return x;
  },
};
Object.assign(Machine.prototype, {
  async logits({ ids, switches }, pause) {
    const reading = await this.reading("logits", switches).read(ids, pause, false);
    return { logits: ids.map((_, place) => [...reading.logitsAt(place)]) };
  },
  async encoded({ text }) {
    return { ids: this.encode(text) };
  },
  async encodedNext({ text }) {
    return { ids: this.tokenizer.encodeNext(text) };
  },
  async called({ name, given }) {
    return { value: [...CALLED[name](...given)] };
  },
  async decode({ ids }) {
    return { text: this.tokenizer.decode(ids) };
  },
});
