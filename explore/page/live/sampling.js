// How a next token is chosen from logits, as in engine/decoding.py.

/** Probabilities of all tokens; those that are dropped have 0. logits: v. how: { temperature, topK, topP, minP }, null for none. */
function distribution(logits, how) {
  const best = argmax(logits);
  if (best === null) return null; // not all logits are numbers
  if (how.temperature === 0) return logits.map((_, id) => (id === best ? 1 : 0));
  const kept = softmax(Float64Array.from(logits, (each) => (each - logits[best]) / how.temperature));
  const order = how.topK || how.topP ? [...kept.keys()].sort((a, b) => kept[b] - kept[a] || a - b) : [];
  const within = how.topK ? order.slice(0, how.topK) : order;
  let inner = 0;
  for (const id of within) inner += kept[id];
  let mass = 0;
  const dropped = new Set(order.slice(within.length));
  for (const id of within) {
    if (how.topP && mass / inner >= how.topP) dropped.add(id);
    mass += kept[id];
  }
  const least = how.minP ? how.minP * kept[best] : 0;
  let sum = 0;
  for (let id = 0; id < kept.length; id++) {
    if (id !== best && (dropped.has(id) || kept[id] < least)) kept[id] = 0;
    sum += kept[id];
  }
  return kept.map((each) => each / sum);
}

/** The likeliest token, of equal ones the first; null if a logit is not a finite number. */
function argmax(values) {
  let best = 0;
  for (let id = 0; id < values.length; id++) {
    if (!Number.isFinite(values[id])) return null;
    if (values[id] > values[best]) best = id;
  }
  return best;
}

/** The ids of the k largest, in order. */
function largest(values, k) {
  const found = [];
  for (let id = 0; id < values.length; id++) {
    if (found.length === k && !(values[id] > values[found[k - 1]])) continue;
    let at = found.length;
    while (at && values[found[at - 1]] < values[id]) at--;
    found.splice(at, 0, id);
    found.length = Math.min(found.length, k);
  }
  return found;
}

/** The token at which the sum of probabilities passes a number from 0 to below 1. */
function drawn(probabilities, random) {
  let [sum, last] = [0, 0];
  for (let id = 0; id < probabilities.length; id++) {
    if (probabilities[id] === 0) continue;
    sum += probabilities[id];
    last = id;
    if (random < sum) return id;
  }
  return last;
}
