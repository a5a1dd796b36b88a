// Questions to what computes: the thread inside of a page, or the server behind it.

const machine = { number: 0, waiting: new Map(), worker: null };

/** The answer; null if a newer question of the same slot has come before it was due. Throws what went wrong. */
function ask(kind, given, slot = null) {
  if (page.live.address) return askServer(kind, given, slot);
  const number = ++machine.number;
  machine.worker.postMessage({ number, kind, given, slot });
  return new Promise((resolve, reject) => machine.waiting.set(number, { resolve, reject }));
}

/** Start the thread and give it the model, whose text the page then forgets. */
function openMachine() {
  if (page.live.address) return Promise.resolve();
  const script = new Blob([byId("worker").textContent], { type: "text/javascript" });
  machine.worker = new Worker(URL.createObjectURL(script));
  machine.worker.onmessage = ({ data }) => {
    const { resolve, reject } = machine.waiting.get(data.number);
    machine.waiting.delete(data.number);
    if (data.failed) reject(new Error(data.failed));
    else resolve(data.stale ? null : data.answer);
  };
  const { tensors, config, tokenizer, classifier } = page.live;
  const opened = ask("open", { tensors, config, tokenizer, classifier, weights: byId("weights").textContent });
  byId("weights").textContent = "";
  return opened;
}

const newest = new Map();

/** The server answers one question of a slot at a time; of those that wait the newest alone is asked. */
async function askServer(kind, given, slot) {
  const number = ++machine.number;
  if (slot) {
    newest.set(slot, number);
    await machine.waiting.get(slot)?.catch(() => null);
    if (newest.get(slot) !== number) return null;
  }
  const answer = fetch(page.live.address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ kind, given }) })
    .then(async (response) => {
      const said = await response.json();
      if (!response.ok) throw new Error(said.failed);
      return binary(said);
    });
  if (slot) machine.waiting.set(slot, answer);
  return answer;
}

/** What the server sends as { bytes: base64 } becomes bytes. */
function binary(value) {
  if (Array.isArray(value) || value === null || typeof value !== "object") return value;
  if ("bytes" in value) return Uint8Array.from(atob(value.bytes), (letter) => letter.charCodeAt(0));
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, binary(each)]));
}
