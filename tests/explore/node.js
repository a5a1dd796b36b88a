// The thread of a live page in node: questions come as JSON lines on standard input, answers go out in the same way.
const vm = require("vm");
const lines = require("readline").createInterface({ input: process.stdin });
const numbers = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : ArrayBuffer.isView(value) ? [...value] : value);
const world = vm.createContext({
  performance, setTimeout, TextEncoder, TextDecoder, atob,
  postMessage: (answer) => process.stdout.write(`${JSON.stringify(answer, numbers)}\n`),
});
vm.runInContext(require("fs").readFileSync(process.argv[2], "utf-8"), world);
lines.on("line", (line) => { world.data = JSON.parse(line); vm.runInContext("onmessage({ data })", world); });
