// What the page draws of a text: the same record that explore/inspected.py makes, computed here.

const CANDIDATES = 8; // likeliest next tokens that are shown
const ATTENTION_BYTES = 8_000_000; // the most that the attention of a text may take
const QUERIES_SHOWN = 32; // first tokens whose queries are shown

/** One text under one setting of the switches. A causal model computes only the tokens after a common beginning. */
class Reading {
  constructor(llama, switches) {
    this.llama = llama;
    this.how = compiled(switches, llama.config);
    this.forget(0);
  }

  /** Keep what was computed for the first `length` tokens. */
  forget(length) {
    const { n_layers: layers, n_heads: heads } = this.llama.config;
    if (length === 0) {
      this.cache = new Cache(this.llama.config);
      this.ids = [];
      this.states = Array.from({ length: layers + 1 }, () => []); // L + 1, then places, of D
      this.weights = Array.from({ length: layers }, () => Array.from({ length: heads }, () => [])); // L h, places, of t
      this.queries = []; // places, of [plain, rotated] h d, of the first layer
      this.lens = Array.from({ length: layers + 1 }, () => []); // L + 1, places
    }
    this.cache.length = this.ids.length = length;
    for (const list of [...this.states, ...this.weights.flat(), this.queries, ...this.lens]) list.length = Math.min(list.length, length);
  }

  /** Compute the states of a text. hasWeights: whether its attention is kept. */
  async read(ids, pause = null, hasWeights = true) {
    let common = 0;
    if (this.how.isCausal) while (common < Math.min(ids.length, this.ids.length) && ids[common] === this.ids[common]) common++;
    this.forget(common);
    const fresh = ids.slice(common);
    const size = this.llama.config.dim;
    const state = (layer, x) => fresh.forEach((_, at) => { this.states[layer][common + at] = x.slice(at * size, (at + 1) * size); });
    const note = hasWeights ? (...noted) => this.note(common, ...noted) : null;
    try {
      if (fresh.length) await this.llama.run(this.llama.embed(fresh), this.cache, this.how, { note, state, pause });
      this.ids = [...ids];
    } catch (error) {
      this.forget(this.how.isCausal ? common : 0);
      throw error;
    }
    return this;
  }

  note(first, layer, head, place, weights, seen, both) {
    const stored = new Uint8Array(seen);
    for (let key = 0; key < seen; key++) stored[key] = Math.round(255 * Math.sqrt(weights[key])); // as `to_bytes` there
    this.weights[layer][head][first + place] = stored;
    if (layer || head || first + place >= QUERIES_SHOWN) return;
    const size = this.llama.config.n_heads * this.llama.config.head_dim;
    const part = (x) => x.slice(place * size, (place + 1) * size);
    this.queries[first + place] = [part(both.plainQuery), part(both.query)];
  }

  /** The logits after one place, by the states after so many layers. Returns v */
  logitsAt(place, layers = this.states.length - 1) {
    const { "norm.weight": weight } = this.llama.weights;
    return this.llama.logits(norm(this.states[layers][place], weight, this.llama.config.layer_norm_eps, this.how));
  }

  get last() {
    return this.logitsAt(this.ids.length - 1);
  }

  /** The logit lens of every layer, in flat lists, see `page_of_lens`. */
  async page(pause) {
    const layers = [];
    for (const [layer, done] of this.lens.entries()) {
      if (!this.how.isCausal) done.length = 0;
      for (let place = 0; place < this.ids.length; place++) {
        const next = this.ids[place + 1] ?? null;
        if (done[place]?.id !== next || done[place]?.next === undefined) done[place] = this.lensAt(layer, place, next);
        if (place % 8 === 7) await pause?.();
      }
      const flat = { ids: done.flatMap((each) => each.ids), p: done.flatMap((each) => each.p) };
      const after = done.slice(0, -1);
      layers.push({ ...flat, next: after.map((each) => each.next), rank: after.map((each) => each.rank), norm: done.map((each) => each.norm) });
    }
    const shown = this.shown();
    return { lens: layers, shown, attention: this.packedAttention(shown) };
  }

  lensAt(layer, place, id) {
    const state = this.states[layer][place];
    const p = softmax(this.logitsAt(place, layer));
    const ids = largest(p, CANDIDATES);
    let rank = 1;
    for (let other = 0; id !== null && other < p.length; other++) if (p[other] > p[id]) rank++;
    const size = Math.sqrt(dot(state, 0, state, 0, state.length));
    return { id, ids, p: ids.map((each) => p[each]), next: id === null ? null : p[id], rank, norm: size };
  }

  /** How many first tokens have room for their attention. */
  shown() {
    const { n_layers: layers, n_heads: heads } = this.llama.config;
    return Math.min(this.ids.length, Math.floor(Math.sqrt(ATTENTION_BYTES / (layers * heads))));
  }

  /** Bytes L h s t. */
  packedAttention(shown) {
    const { n_layers: layers, n_heads: heads } = this.llama.config;
    const bytes = new Uint8Array(layers * heads * shown * shown);
    for (let layer = 0, at = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        for (let query = 0; query < shown; query++, at += shown) {
          const row = this.weights[layer][head][query]; // none of a layer that is off
          if (row) bytes.set(row.subarray(0, shown), at);
        }
      }
    }
    return bytes;
  }

  /** The first layer's queries before and after the rotation, 2 h s d, as `page_of_queries` packs them. */
  packedQueries() {
    const { n_heads: heads, head_dim: d } = this.llama.config;
    const shown = this.queries.length;
    const data = new Int16Array(2 * heads * shown * d);
    let unit = 1e-9;
    for (const each of this.queries.flat()) for (const value of each) if (Math.abs(value) > unit) unit = Math.abs(value);
    unit /= 32767;
    for (let half = 0; half < 2; half++) {
      for (let head = 0; head < heads; head++) {
        for (let place = 0; place < shown; place++) {
          const at = ((half * heads + head) * shown + place) * d;
          for (let i = 0; i < d; i++) data[at + i] = Math.round(this.queries[place][half][head * d + i] / unit);
        }
      }
    }
    return { shown, unit, data: new Uint8Array(data.buffer) };
  }

  /** One head's numbers for a pair of places: query and key before and after the rotation, product, score, weight. */
  numbers(layer, head, query, key) {
    const { llama, how } = this;
    const { n_kv_heads: g, n_heads: h, head_dim: d, layer_norm_eps: eps } = llama.config;
    const weight = llama.weights[`layers.${layer}.attention_norm.weight`];
    const at = (place) => llama.heads(layer, norm(this.states[layer][place], weight, eps, how), place, how);
    const [ofQuery, ofKey] = [at(query), at(key)];
    const part = (x, number) => [...x.slice(number * d, (number + 1) * d)];
    const keyHead = llama.keyHead(head, how);
    const rotated = { query: part(ofQuery.query, head), key: part(ofKey.key, keyHead) };
    const product = rotated.query.reduce((sum, value, i) => sum + value * rotated.key[i], 0);
    const off = how.off.has(`${layer + 1}`);
    const even = how.uniform.has(`${layer + 1}.${head + 1}`);
    const seen = how.isCausal ? query + 1 : this.ids.length;
    const scores = Array.from({ length: off ? 0 : seen }, (_, t) => // whole: the maps have bytes
      even ? 0 : dot(rotated.query, 0, this.cache.layers[layer].keys, (t * g + keyHead) * d, d) / llama.divisor(how));
    return {
      plain: { query: part(ofQuery.plainQuery, head), key: part(ofKey.plainKey, keyHead) }, rotated, product,
      divisor: llama.divisor(how), score: product / llama.divisor(how), keyHead, of: [h, g],
      weight: softmax(scores)[key] ?? 0, isHidden: how.isCausal && key > query, isOther: off || even,
    };
  }
}

/** exp of the mean of -log p of each token of a text after the ones before it. Windows as `engine.tasks.TextWindows`. */
async function perplexity(llama, ids, bos, switches, pause) {
  const how = compiled(switches, llama.config);
  const length = llama.config.max_seq_len;
  let sum = 0;
  for (let from = 0; from < ids.length; from += length) {
    const targets = ids.slice(from, from + length);
    const read = [bos, ...targets.slice(0, -1)];
    const h = await llama.run(llama.embed(read), new Cache(llama.config), how, { pause });
    for (const [place, target] of targets.entries()) {
      const p = softmax(llama.logits(h.subarray(place * llama.config.dim, (place + 1) * llama.config.dim)));
      sum -= Math.log(p[target]);
    }
  }
  return Math.exp(sum / ids.length);
}

/** A classifier's probabilities for token ids, see classifier.py; as `decide` compares them. Returns c */
function classProbabilities(llama, classifier, states, how) {
  const h = norm(states, llama.weights["norm.weight"], llama.config.layer_norm_eps, how);
  if (classifier.labelIds) {
    const logits = llama.logits(h);
    const most = logits.reduce((a, b) => Math.max(a, b));
    const sum = Math.log(logits.reduce((total, each) => total + Math.exp(each - most), 0)) + most;
    return softmax(classifier.labelIds.map((ids) => ids.reduce((total, id) => total + logits[id] - sum, 0)));
  }
  const { "head.weight": weight, "head.bias": bias } = llama.weights;
  return softmax(Array.from(linear(weight, h, llama.config.dim, bias.length), (each, index) => each + bias[index]));
}
