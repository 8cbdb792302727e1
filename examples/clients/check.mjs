// Runs OpenAI's and Replicate's own clients against a gateway, and says for each feature whether it works.
//
//   GATEWAY=http://127.0.0.1:8430 TOKEN=... MODEL=llama EMBEDDER=llama node check.mjs
//
// WEBHOOK=1 also waits for a delivery on a port of its own, which the gateway's task nodes must be allowed to reach.
// LIMITED is a token that may make one or two requests a second, which the client of OpenAI is to respect.
import assert from 'node:assert/strict'
import http from 'node:http'
import OpenAI, { toFile } from 'openai'
import Replicate, { validateWebhook } from 'replicate'

const base = process.env.GATEWAY ?? 'http://127.0.0.1:8430'
const token = process.env.TOKEN ?? 'open'
const model = process.env.MODEL ?? 'llama'
const embedder = process.env.EMBEDDER ?? model

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: token, maxRetries: 0 })
const replicate = new Replicate({ baseUrl: `${base}/v1`, auth: token, useFileOutput: false })
const messages = [{ role: 'user', content: 'hello' }]

let failed = 0
async function check(name, run) {
  try {
    await run()
    console.log(`ok ${name}`)
  } catch (error) {
    failed++
    console.log(`not ok ${name}: ${error.stack ?? error}`)
  }
}

async function until(read, done) {
  for (;;) {
    const value = await read()
    if (done(value)) return value
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}

await check('openai models', async () => {
  const names = []
  for await (const m of openai.models.list()) names.push(m.id)
  assert.ok(names.includes(model), `${names}`)
  assert.equal((await openai.models.retrieve(model)).id, model)
})

await check('openai chat', async () => {
  const answer = await openai.chat.completions.create({ model, messages })
  assert.equal(typeof answer.choices[0].message.content, 'string')
  assert.ok(answer.usage.completion_tokens > 0)
})

await check('openai stream', async () => {
  let text = ''
  let usage = 0
  for await (const chunk of await openai.chat.completions.create({ model, messages, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? ''
    if (chunk.usage) usage++
  }
  assert.ok(text.length > 0)
  assert.equal(usage, 0, 'token counts that were not asked for')
})

await check('openai stream with usage', async () => {
  let usage
  const options = { model, messages, stream: true, stream_options: { include_usage: true } }
  for await (const chunk of await openai.chat.completions.create(options)) usage = chunk.usage ?? usage
  assert.ok(usage?.completion_tokens > 0)
})

await check('openai tools', async () => {
  const tools = [{ type: 'function', function: { name: 'weather', parameters: { type: 'object', properties: {} } } }]
  const answer = await openai.chat.completions.create({ model, messages, tools })
  assert.equal(answer.choices[0].message.tool_calls[0].function.name, 'weather')
})

await check('openai JSON mode', async () => {
  const answer = await openai.chat.completions.create({ model, messages, response_format: { type: 'json_object' } })
  assert.equal(typeof JSON.parse(answer.choices[0].message.content), 'object')
})

await check('openai responses', async () => {
  const answer = await openai.responses.create({ model, input: 'hello' })
  assert.ok(answer.output_text.length > 0)
})

await check('openai audio upload', async () => {
  const sound = Buffer.from(Array.from({ length: 70_000 }, (_, i) => i % 256))
  const answer = await openai.audio.transcriptions.create({ model, file: await toFile(sound, 'a.wav') })
  assert.equal(typeof answer.text, 'string')
  if (process.env.LENGTHS) assert.equal(answer.text, '70000 bytes of a.wav') // a worker that counts them
})

await check('openai audio download', async () => {
  const answer = await openai.audio.speech.create({ model, voice: 'alloy', input: 'hello' })
  assert.ok((await answer.arrayBuffer()).byteLength > 0)
})

await check('openai images', async () => {
  const answer = await openai.images.generate({ model, prompt: 'a penstock' })
  assert.equal(typeof answer.data[0].b64_json, 'string')
})

await check('openai embeddings', async () => {
  const answer = await openai.embeddings.create({ model: embedder, input: ['a', 'b'] })
  assert.equal(answer.data.length, 2)
  assert.ok(Math.abs(answer.data[1].embedding[0] - 0.5) < 1e-6) // asked for in base64
})

await check('openai error', async () => {
  const refused = await openai.chat.completions.create({ model: 'no-such-model', messages }).catch((e) => e)
  assert.ok(refused instanceof OpenAI.NotFoundError)
  assert.equal(refused.code, 'model_not_found')
})

if (process.env.LIMITED) {
  await check('openai retries on 429', async () => {
    let refused = 0
    const counting = async (...request) => {
      const answer = await fetch(...request)
      if (answer.status === 429) {
        refused++
        assert.ok(Number(answer.headers.get('retry-after')) >= 1)
      }
      return answer
    }
    const limited = new OpenAI({ baseURL: `${base}/v1`, apiKey: process.env.LIMITED, maxRetries: 10, fetch: counting })
    const call = () => limited.chat.completions.create({ model, messages })
    await Promise.all(Array.from({ length: 5 }, call)) // at once: one after another they may be slower than the rate
    assert.ok(refused > 0 && refused < 20, `${refused} refusals`)
  })
}

const lines = (n) => Array.from({ length: n }, (_, i) => JSON.stringify({
  custom_id: `r${i}`, method: 'POST', url: '/v1/chat/completions', body: { model, messages },
})).join('\n')

await check('openai files', async () => {
  const file = await openai.files.create({ file: await toFile(Buffer.from(lines(2)), 'in.jsonl'), purpose: 'batch' })
  assert.equal((await openai.files.retrieve(file.id)).filename, 'in.jsonl')
  assert.equal(await (await openai.files.content(file.id)).text(), lines(2))
  const ids = []
  for await (const f of openai.files.list({ purpose: 'batch', limit: 1 })) ids.push(f.id)
  assert.ok(ids.includes(file.id))
  assert.equal((await openai.files.delete(file.id)).deleted, true)
  assert.ok(await openai.files.retrieve(file.id).catch((e) => e) instanceof OpenAI.NotFoundError)
})

await check('openai batches', async () => {
  const file = await openai.files.create({ file: await toFile(Buffer.from(lines(20)), 'in.jsonl'), purpose: 'batch' })
  const made = await openai.batches.create({
    input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h', metadata: { for: 'check' },
  })
  const batch = await until(() => openai.batches.retrieve(made.id), (b) => b.completed_at || b.failed_at)
  assert.equal(batch.status, 'completed', JSON.stringify(batch.errors))
  assert.deepEqual(batch.request_counts, { total: 20, completed: 20, failed: 0 })
  assert.equal(batch.metadata.for, 'check')
  const output = (await (await openai.files.content(batch.output_file_id)).text()).trim().split('\n').map((l) => JSON.parse(l))
  assert.deepEqual(new Set(output.map((o) => o.custom_id)).size, 20)
  assert.ok(output.every((o) => o.response.status_code === 200 && o.response.body.choices && o.error === null))
  const ids = []
  for await (const b of openai.batches.list({ limit: 1 })) ids.push(b.id)
  assert.ok(ids.includes(made.id))
  const refused = await openai.batches.cancel(made.id).catch((e) => e)
  assert.ok(refused instanceof OpenAI.BadRequestError)
})

await check('replicate run', async () => {
  const output = await replicate.run(`acme/${model}`, { input: { prompt: 'hello' } })
  assert.ok(Array.isArray(output) && typeof output[0] === 'string', JSON.stringify(output))
})

await check('replicate run that polls', async () => {
  const output = await replicate.run(`acme/${model}:${model}`, { input: { prompt: 'hello' }, wait: { mode: 'poll', interval: 50 } })
  assert.equal(typeof output[0], 'string')
})

await check('replicate predictions', async () => {
  const made = await replicate.predictions.create({ version: model, input: { prompt: 'hello' } })
  assert.ok(['starting', 'processing', 'succeeded'].includes(made.status))
  const ended = await replicate.wait(made, { interval: 50 })
  assert.equal(ended.status, 'succeeded')
  assert.equal((await replicate.predictions.get(made.id)).id, made.id)
  const first = await replicate.predictions.list()
  assert.ok(first.results.some((p) => p.id === made.id))
  assert.equal((await replicate.predictions.cancel(made.id)).status, 'succeeded')
})

await check('replicate deployments predictions', async () => {
  const made = await replicate.deployments.predictions.create('acme', model, { input: { prompt: 'hello' } })
  assert.equal((await replicate.wait(made, { interval: 50 })).status, 'succeeded')
})

await check('replicate stream', async () => {
  let text = ''
  let done = false
  for await (const event of replicate.stream(`acme/${model}`, { input: { prompt: 'hello' } })) {
    if (event.event === 'output') text += event.data
    done ||= event.event === 'done'
  }
  assert.ok(text.length > 0 && done, text)
})

await check('replicate error', async () => {
  const refused = await replicate.predictions.create({ version: 'no-such-model', input: {} }).catch((e) => e)
  assert.equal(refused.response.status, 404)
})

if (process.env.WEBHOOK) {
  await check('replicate webhook', async () => {
    let deliver
    const delivery = new Promise((resolve) => { deliver = resolve })
    const server = http.createServer((request, response) => {
      const pieces = []
      request.on('data', (piece) => pieces.push(piece))
      request.on('end', () => {
        response.end()
        deliver(new Request('http://receiver/', { method: 'POST', headers: request.headers, body: Buffer.concat(pieces) }))
      })
    })
    await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
    const { key } = await replicate.webhooks.default.secret.get()
    const made = await replicate.predictions.create({
      version: model, input: { prompt: 'hello' }, webhook: `http://127.0.0.1:${server.address().port}/`,
      webhook_events_filter: ['completed'],
    })
    const request = await delivery
    assert.equal(await validateWebhook(request.clone(), key), true)
    const told = await request.json()
    assert.equal(told.id, made.id)
    assert.equal(told.status, 'succeeded')
    server.close()
  })
}

process.exit(failed ? 1 : 0)
