// The thread that computes: it answers the page's questions one after the other, and drops those that are out of date.

const STALE = Symbol("a newer question of the same kind has come");
const PAUSE_MS = 25; // how long a newer question waits at most, but for one layer
const NEXT_SHOWN = 12;
const PART_MS = 50; // of an occlusion, between two questions

class Machine {
  constructor({ config, tensors, weights, tokenizer, classifier }) {
    this.config = config;
    this.classifier = classifier;
    this.tokenizer = makeTokenizer(tokenizer);
    this.llama = new Llama(config, readTensors(weights, tensors));
    this.readings = new Map();
    if (classifier?.suffix) this.suffix = this.tokenizer.encodeNext(classifier.suffix);
  }

  /** The newest tokens of a text that the model reads, and how many stand before them. added: ids behind the text.
   *
   * A classifier has cut its text by itself, or reads it whole.
   */
  window({ text, added = [] }) {
    const ids = [...this.encode(text), ...added];
    const most = this.classifier ? this.classifier.mostTokens : this.config.max_seq_len;
    if (this.classifier && ids.length > most) throw new Error(`the text has ${ids.length} tokens; the page takes ${most} at most`);
    const first = Math.max(0, ids.length - most);
    return { ids: ids.slice(first), first, bad: ids.filter((id) => id >= this.config.vocab_size) };
  }

  /** As a classifier reads a text, see `LlamaDataset`; else with the tokens that begin a text. */
  encode(text) {
    if (!this.classifier) return this.tokenizer.encode(text);
    const { suffix, maxLen, bos } = this.classifier;
    const isCausal = this.config.attention === "causal";
    const own = this.tokenizer.encodeAll(suffix && !isCausal ? `${text} ${suffix}` : text).slice(0, maxLen ?? undefined);
    if (!isCausal) return [...bos, ...own];
    const after = this.suffix ?? [];
    return [...[...bos, ...own].slice(0, this.config.max_seq_len - after.length), ...after];
  }

  /** The reading under these switches; one for each use is kept, so that what is equal is not computed again. */
  reading(use, switches) {
    const key = JSON.stringify(switches);
    if (this.readings.get(use)?.key !== key) this.readings.set(use, { key, reading: new Reading(this.llama, switches) });
    return this.readings.get(use).reading;
  }

  async read(asked, pause) {
    const { ids, first, bad } = this.window(asked);
    if (bad.length || !ids.length) return { ids, bad };
    const reading = await this.reading(asked.use, asked.switches).read(ids, pause);
    const record = await reading.page(pause);
    const named = new Set([...ids, ...record.lens.flatMap((each) => each.ids)]);
    const pieces = Object.fromEntries([...named].map((id) => [id, this.tokenizer.piece(id)]));
    return { ids, first, pieces, record, queries: reading.packedQueries(), probabilities: this.decision(reading) };
  }

  decision(reading) {
    if (!this.classifier) return null;
    const pads = this.config.attention === "causal" ? this.classifier.pad : null; // the other kind reads padding, too
    let last = reading.ids.length - 1;
    while (last > 0 && reading.ids[last] === pads) last--;
    return [...classProbabilities(this.llama, this.classifier, reading.states.at(-1)[last], reading.how)];
  }

  /** A classifier's loss of probability without each token but the first, flat s c, as `explore.decision.occluded`.
   *
   * A part of it: a new text need not wait for the rest. next: `first` of the next part, null at the end.
   */
  async occlusion(asked, pause) {
    const end = performance.now() + PART_MS;
    const { ids } = this.window(asked);
    const together = Math.ceil(ids.length ** 2 / this.classifier.occludedPositions); // neighbours that are left out at once
    const texts = ids.length < 2 + together ? 0 : Math.ceil((ids.length - 1) / together);
    const whole = this.decision(await this.reading("whole", asked.switches).read(ids, pause, false));
    const rows = ids.map(() => whole.map(() => null));
    const begun = asked.first ?? 0;
    let next = begun;
    for (; next < texts && (next === begun || performance.now() < end); next++) {
      const start = Math.min(1 + next * together, ids.length - together);
      const without = ids.filter((_, at) => at < start || at >= start + together);
      const found = this.decision(await this.reading("without", asked.switches).read(without, pause, false));
      rows.fill(whole.map((p, label) => p - found[label]), start, start + together);
    }
    return { occlusion: rows.flat(), together, next: next < texts ? next : null };
  }

  /** The next token and its likeliest rivals. random: from 0 to below 1. sampling: see `distribution`. */
  async next(asked, pause) {
    const { ids, bad } = this.window(asked);
    if (bad.length || !ids.length) return {};
    const reading = await this.reading(asked.use ?? "next", asked.switches).read(ids, pause, false);
    const logits = reading.last;
    const p = distribution(logits, asked.sampling);
    if (p === null) return { broken: true };
    const plain = softmax(Float64Array.from(logits));
    const top = largest(plain, NEXT_SHOWN).map((id) => ({ id, piece: this.tokenizer.piece(id), plain: plain[id], p: p[id] }));
    const id = asked.sampling.temperature === 0 ? argmax(logits) : drawn(p, asked.random);
    return { id, piece: this.tokenizer.piece(id), p: plain[id], top, kept: p.reduce((count, each) => count + (each > 0), 0) };
  }

  async numbers(asked, pause) {
    const { ids } = this.window(asked);
    const reading = await this.reading(asked.use, asked.switches).read(ids, pause);
    return reading.numbers(asked.layer, asked.head, asked.query, asked.key);
  }

  async perplexity(asked, pause) {
    const ids = asked.text ? (this.tokenizer.encodeAll ?? this.tokenizer.encode).call(this.tokenizer, asked.text) : [];
    if (!ids.length) return { tokens: 0 };
    return { tokens: ids.length, value: await perplexity(this.llama, ids, this.classifier?.bos[0] ?? asked.bos, asked.switches, pause) };
  }

  /** What the added tokens write behind the text. */
  async written({ text, added }) {
    const ids = this.encode(text);
    return { text: this.tokenizer.decode([...ids, ...added]).slice(this.tokenizer.decode(ids).length) };
  }
}

// ------------------------------------------------------------------------------------------------- questions

const waiting = [];
let machine = null;
let isBusy = false;

onmessage = ({ data }) => {
  for (const old of waiting) if (data.slot && old.slot === data.slot) old.isStale = true;
  waiting.push(data);
  if (!isBusy) answerAll();
};

async function answerAll() {
  isBusy = true;
  while (waiting.length) {
    const asked = waiting[0];
    postMessage({ number: asked.number, ...(asked.isStale ? { stale: true } : await answer(asked)) });
    waiting.shift();
  }
  isBusy = false;
}

async function answer(asked) {
  let paused = performance.now();
  const pause = async () => {
    if (performance.now() - paused < PAUSE_MS) return;
    await new Promise((resolve) => { setTimeout(resolve, 0); });
    if (asked.isStale) throw STALE;
    paused = performance.now();
  };
  try {
    if (asked.kind === "open") {
      machine = new Machine(opened(asked.given));
      return { answer: {} };
    }
    return { answer: await machine[asked.kind](asked.given, pause) };
  } catch (error) {
    return error === STALE ? { stale: true } : { failed: String(error?.message ?? error) };
  }
}

/** What the page holds as text in base64, as bytes. */
function opened({ weights, tokenizer, ...given }) {
  const rules = tokenizer?.rules ? bytesOf(tokenizer.rules) : null;
  return { ...given, weights: bytesOf(weights).buffer, tokenizer: tokenizer && { ...tokenizer, rules } };
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}
