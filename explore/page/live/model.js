// The forward pass of llama.py in typed arrays, with the switches that break it on purpose.
//
// Letters for shapes: s new position, t key position, h query heads, g key/value heads, d head dim, D model dim,
// f feed-forward dim, v vocabulary, L layers. A matrix is one Float32Array, row after row.

/** What a float16 is, by its bits: a table of all 65,536. */
function halves() {
  return Float32Array.from({ length: 65536 }, (_, bits) => {
    const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
}

/** The tensors of a page as float32. tensors: [{ name, kind, at, rows, columns }], where kind is f16, f32 or q8.
 *
 * 8 bits: whole numbers, and behind them a float32 for each row, by which they are multiplied.
 */
function readTensors(buffer, tensors) {
  const half = halves();
  const read = {
    f32: (at, count) => new Float32Array(buffer.slice(at, at + 4 * count)),
    f16: (at, count) => Float32Array.from(new Uint16Array(buffer, at, count), (bits) => half[bits]),
    q8: (at, count, columns) => {
      const units = new Float32Array(buffer.slice(at + count, at + count + (4 * count) / columns));
      return Float32Array.from(new Int8Array(buffer, at, count), (whole, index) => whole * units[(index / columns) | 0]);
    },
  };
  return Object.fromEntries(tensors.map(({ name, kind, at, rows, columns }) => [name, read[kind](at, rows * columns, columns)]));
}

/** y = W x for s vectors. x: s n, weight: m n -> s m. Four vectors at a time share a row of the weight. */
function linear(weight, x, n, m) {
  const s = x.length / n;
  const y = new Float32Array(s * m);
  let first = 0;
  for (; first + 4 <= s; first += 4) {
    const [x0, x1, x2, x3] = [0, 1, 2, 3].map((each) => (first + each) * n);
    for (let row = 0, at = 0; row < m; row++) {
      let [y0, y1, y2, y3] = [0, 0, 0, 0];
      for (let column = 0; column < n; column++, at++) {
        const w = weight[at];
        y0 += w * x[x0 + column];
        y1 += w * x[x1 + column];
        y2 += w * x[x2 + column];
        y3 += w * x[x3 + column];
      }
      y[first * m + row] = y0;
      y[(first + 1) * m + row] = y1;
      y[(first + 2) * m + row] = y2;
      y[(first + 3) * m + row] = y3;
    }
  }
  for (; first < s; first++) {
    for (let row = 0; row < m; row++) y[first * m + row] = dot(weight, row * n, x, first * n, n);
  }
  return y;
}

/** The product of n numbers of a and of b. Four sums run beside each other, so that none waits for the one before. */
function dot(a, atA, b, atB, n) {
  let [s0, s1, s2, s3, i] = [0, 0, 0, 0, 0];
  for (; i + 4 <= n; i += 4) {
    s0 += a[atA + i] * b[atB + i];
    s1 += a[atA + i + 1] * b[atB + i + 1];
    s2 += a[atA + i + 2] * b[atB + i + 2];
    s3 += a[atA + i + 3] * b[atB + i + 3];
  }
  for (; i < n; i++) s0 += a[atA + i] * b[atB + i];
  return s0 + s1 + (s2 + s3);
}

/** RMSNorm of every vector of x. weight: D, x: s D -> s D */
function norm(x, weight, eps, how) {
  const size = weight.length;
  const y = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += size) {
    let sum = 0;
    for (let i = 0; i < size; i++) sum += how.breaks.has("norm") ? x[at + i] : x[at + i] * x[at + i];
    const scale = 1 / Math.sqrt(sum / size + eps);
    for (let i = 0; i < size; i++) y[at + i] = x[at + i] * scale * weight[i];
  }
  return y;
}

const silu = (x) => x / (1 + Math.exp(-x));

/** x times the normal distribution up to x; erf by Abramowitz and Stegun 7.1.26, right to seven places. */
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2;
  const t = 1 / (1 + 0.3275911 * z);
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  const erf = 1 - tail * Math.exp(-z * z);
  return 0.5 * x * (1 + Math.sign(x) * erf);
}

/** The angle of each pair from one position to the next, see rope.py. d/2 numbers, rounded as PyTorch rounds them. */
function frequencies({ head_dim: d, rope_theta: theta, rope_scaling: scaling }) {
  const plain = Float32Array.from({ length: d / 2 }, (_, pair) => 1 / Math.fround(theta ** Math.fround((2 * pair) / d)));
  if (!scaling) return plain;
  const [kind, factor, low, high, length] = scaling;
  return plain.map((each) => {
    if (kind === "linear") return each / factor;
    const share = Math.min(1, Math.max(0, ((length * each) / (2 * Math.PI) - low) / (high - low)));
    return each * (share + (1 - share) / factor);
  });
}

/** Turn each pair of every head by its position, in place. x: s heads d; first: the position of the first vector. */
function rotate(x, heads, d, first, angles, how) {
  const half = d / 2;
  const [step, apart] = how.breaks.has("halves") ? [1, half] : [2, 1];
  for (let at = 0, position = first; at < x.length; at += heads * d, position++) {
    for (let pair = 0; pair < half; pair++) {
      const angle = Math.fround(position * angles[pair]);
      const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
      for (let head = 0, one = at + pair * step; head < heads; head++, one += d) {
        const [a, b] = [x[one], x[one + apart]];
        x[one] = a * cos - b * sin;
        x[one + apart] = a * sin + b * cos;
      }
    }
  }
}

/** What switches mean for one model. switches: { attention, breaks, off, uniform }.
 *
 * off: layers and heads without output, "2" or "2.1", counted from 1. uniform: heads with even weights.
 */
function compiled(switches, config) {
  const breaks = new Set(switches.breaks ?? []);
  const causal = (switches.attention ?? config.attention) === "causal";
  return { breaks, isCausal: causal !== breaks.has("mask"), off: new Set(switches.off ?? []), uniform: new Set(switches.uniform ?? []) };
}

/** Keys and values of the positions so far: for each layer t g d. The arrays grow as a text does. */
class Cache {
  constructor(config) {
    this.size = config.n_kv_heads * config.head_dim;
    this.layers = Array.from({ length: config.n_layers }, () => ({ keys: new Float32Array(0), values: new Float32Array(0) }));
    this.length = 0;
  }

  store(layer, keys, values) {
    const [kept, used] = [this.layers[layer], this.length * this.size];
    for (const [name, added] of Object.entries({ keys, values })) {
      if (kept[name].length < used + added.length) {
        const larger = new Float32Array(2 * (used + added.length));
        larger.set(kept[name].subarray(0, used));
        kept[name] = larger;
      }
      kept[name].set(added, used);
    }
    return kept;
  }
}

class Llama {
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    this.output = weights[config.tied ? "tok_embeddings.weight" : "output.weight"];
    this.angles = frequencies(config);
  }

  /** Rows of the embedding. ids: s -> s D */
  embed(ids) {
    const size = this.config.dim;
    const x = new Float32Array(ids.length * size);
    ids.forEach((id, place) => {
      const row = Math.max(id, 0) * size; // -1: padding of a vocabulary that has no piece for it
      x.set(this.weights["tok_embeddings.weight"].subarray(row, row + size), place * size);
    });
    return x;
  }

  /** The hidden states of new tokens, behind those that the cache holds. x: s D -> s D
   *
   * note: called with every layer's number, queries and weights, see `attention`. state: called with the residual
   * stream before the first layer and after each. pause: awaited after each layer, so that a worker can be interrupted.
   */
  async run(x, cache, how, { note = null, state = null, pause = null } = {}) {
    const { n_layers: layers, dim, layer_norm_eps: eps } = this.config;
    state?.(0, x);
    for (let layer = 0; layer < layers; layer++) {
      x = this.layer(layer, x, cache, how, note);
      state?.(layer + 1, x);
      await pause?.();
    }
    cache.length += x.length / dim;
    return norm(x, this.weights["norm.weight"], eps, how);
  }

  /** h: s D -> logits: s v */
  logits(h) {
    return linear(this.output, h, this.config.dim, this.config.vocab_size);
  }

  layer(layer, x, cache, how, note) {
    if (how.off.has(`${layer + 1}`)) return x;
    const weight = (name) => this.weights[`layers.${layer}.${name}.weight`];
    const normed = (each, name) => norm(each, weight(name), this.config.layer_norm_eps, how);
    const residual = how.breaks.has("residual") ? (each) => each : (each, from) => each.map((value, i) => value + from[i]);
    const h = residual(this.attention(layer, normed(x, "attention_norm"), cache, how, note), x);
    return residual(this.feedForward(weight, normed(h, "ffn_norm"), how), h);
  }

  feedForward(weight, x, how) {
    const { dim, hidden_dim: f } = this.config;
    const activation = how.breaks.has("gelu") ? gelu : silu;
    const [gate, up] = ["w1", "w3"].map((name) => linear(weight(`feed_forward.${name}`), x, dim, f));
    for (let i = 0; i < gate.length; i++) gate[i] = activation(gate[i]) * up[i];
    return linear(weight("feed_forward.w2"), gate, f, dim);
  }

  /** A layer's queries (s h d) and keys (s g d) before and after the rotation. x: s D, normalised */
  heads(layer, x, first, how) {
    const { dim, n_heads: h, n_kv_heads: g, head_dim: d } = this.config;
    const project = (name, count) => linear(this.weights[`layers.${layer}.attention.${name}.weight`], x, dim, count * d);
    const [plainQuery, plainKey] = [project("compute_query", h), project("compute_key", g)];
    const [query, key] = [plainQuery.slice(), plainKey.slice()];
    rotate(query, h, d, first + (how.breaks.has("position") ? 1 : 0), this.angles, how);
    rotate(key, g, d, first, this.angles, how);
    return { plainQuery, plainKey, query, key };
  }

  /** Which key/value head a query head reads. */
  keyHead(head, how) {
    if (how.breaks.has("heads")) return 0;
    const { n_heads: h, n_kv_heads: g } = this.config;
    return how.breaks.has("repeat") ? head % g : Math.floor(head / (h / g));
  }

  /** What a product of query and key is divided by. */
  divisor(how) {
    return how.breaks.has("scores") ? 1 : Math.sqrt(this.config.head_dim);
  }

  attention(layer, x, cache, how, note) {
    const { dim, n_heads: h, n_kv_heads: g, head_dim: d } = this.config;
    const count = x.length / dim;
    const both = this.heads(layer, x, cache.length, how);
    const newValues = linear(this.weights[`layers.${layer}.attention.compute_value.weight`], x, dim, g * d);
    const { keys, values } = cache.store(layer, both.key, newValues);
    const all = cache.length + count;
    const joined = new Float32Array(count * h * d);
    const [weights, divisor] = [new Float32Array(all), this.divisor(how)];
    for (let place = 0; place < count; place++) {
      const seen = how.isCausal ? cache.length + place + 1 : all;
      for (let head = 0; head < h; head++) {
        const [at, from] = [(place * h + head) * d, this.keyHead(head, how) * d];
        for (let t = 0; t < seen; t++) weights[t] = dot(both.query, at, keys, t * g * d + from, d) / divisor;
        softmax(weights, seen);
        if (how.uniform.has(`${layer + 1}.${head + 1}`)) weights.fill(1 / seen, 0, seen);
        note?.(layer, head, place, weights, seen, both);
        if (how.off.has(`${layer + 1}.${head + 1}`)) continue;
        for (let t = 0; t < seen; t++) {
          const [weight, value] = [weights[t], t * g * d + from];
          for (let i = 0; i < d; i++) joined[at + i] += weight * values[value + i];
        }
      }
    }
    return linear(this.weights[`layers.${layer}.attention.compute_output.weight`], joined, h * d, dim);
  }
}

/** In place, of the first `count` numbers. */
function softmax(values, count = values.length) {
  let [most, sum] = [-Infinity, 0];
  for (let i = 0; i < count; i++) if (values[i] > most) most = values[i];
  for (let i = 0; i < count; i++) sum += values[i] = Math.exp(values[i] - most); // NaN if any is
  for (let i = 0; i < count; i++) values[i] /= sum;
  return values;
}
