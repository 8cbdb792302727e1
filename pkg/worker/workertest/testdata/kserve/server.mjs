// A server of the Open Inference Protocol (KServe v2) for one ONNX model, on the
// CPU. Prints "listening on http://127.0.0.1:PORT". Like Triton it answers health
// with a status code alone, 400 for not ready.
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import * as ort from "onnxruntime-node";

const [name, file] = ["vad", "@ricky0123/vad-web/dist/silero_vad_v5.onnx"];
const arrays = { FP32: Float32Array, INT64: BigInt64Array };
const types = { FP32: "float32", INT64: "int64" };
let session;

const server = createServer(async (request, reply) => {
  const send = (status, body) => {
    reply.writeHead(status, { "Content-Type": "application/json" });
    reply.end(body === undefined ? "" : JSON.stringify(body));
  };
  const path = `${request.method} ${request.url}`;
  if (path === "GET /v2/health/live") return send(200);
  if (path === "GET /v2/health/ready" || path === `GET /v2/models/${name}/ready`) return send(session ? 200 : 400);
  if (path !== `POST /v2/models/${name}/infer`) return send(404, { error: "Request for unknown model" });
  if (!session) return send(503, { error: "model is not ready" });
  try {
    let text = "";
    for await (const part of request) text += part;
    const { id, inputs } = JSON.parse(text);
    const feeds = {};
    for (const { name, shape, datatype, data } of inputs) {
      if (!arrays[datatype]) throw new Error(`unsupported datatype ${datatype}`);
      const values = datatype === "INT64" ? data.map(BigInt) : data;
      feeds[name] = new ort.Tensor(types[datatype], arrays[datatype].from(values), shape);
    }
    const results = await session.run(feeds);
    const outputs = Object.entries(results).map(([name, tensor]) => ({
      name, shape: tensor.dims, datatype: "FP32", data: Array.from(tensor.data),
    }));
    send(200, { model_name: name, id, outputs });
  } catch (problem) {
    send(400, { error: String(problem.message ?? problem) });
  }
});

server.listen(0, "127.0.0.1", async () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
  session = await ort.InferenceSession.create(fileURLToPath(import.meta.resolve(file)));
});
