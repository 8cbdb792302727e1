"""An inference worker for GPUs that speaks OpenAI's protocol: a transformer of Llama's shape with random weights.

    python3 worker.py --size 8b --slots 64 --listen 127.0.0.1:0      prints: listening on 127.0.0.1:41837
    python3 worker.py --size tiny --device cpu                       the same protocol on any machine

It needs PyTorch and aiohttp. README.md beside it says what it does and what it leaves out.
"""

import argparse
import asyncio
import collections
import itertools
import json
import multiprocessing
import time

# ---------------------------------------------------------------- the engine, a process of its own

# width, layers, heads, heads of keys and values, size of a head, width of the feed-forward part, tokens known
SIZES = {
    "tiny": (64, 2, 4, 2, 16, 128, 256),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
}


def engine_main(conn, log, options):
    """Body of the engine's process: takes requests from conn, and sends tokens back, until conn is closed."""
    import torch

    with torch.inference_mode():
        engine = Engine(torch, conn, options)
        with open(log, "a", buffering=1, encoding="utf-8") if log else open("/dev/null", "a") as file:
            engine.log = file
            conn.send(("ready", engine.about))
            try:
                engine.run()
            except (EOFError, BrokenPipeError, KeyboardInterrupt):
                pass  # the server has gone


class Engine:
    """Runs one forward pass for all slots at a time; a request has a slot from its prompt to its last token."""

    def __init__(self, torch, conn, options):
        self.torch, self.conn, self.options = torch, conn, options
        self.slots, self.length = options.slots, options.length
        self.pending = collections.deque()  # requests without a slot
        self.running = [None] * self.slots
        self.model = Model(torch, options)
        self.steps = 0
        began = time.monotonic()
        self.model.prepare()
        took = time.monotonic() - began
        self.about = f"{self.model.parameters / 1e9:.2f} billion parameters, ready {took:.1f} s later"

    def run(self):
        while True:
            idle = not self.pending and not any(self.running)
            while idle or self.conn.poll():
                self.take(self.conn.recv())
                idle = False
            out = []
            self.admit(out)
            if any(self.running):
                self.step(out)
            if out:
                self.conn.send(("out", out, self.steps))

    def take(self, message):
        verb, key = message[0], message[1]
        if verb == "add":
            request = Request(*message[1:])
            self.note("arrive", request)
            self.pending.append(request)
            return
        for request in list(self.pending):  # drop: nobody waits for the answer any more
            if request.key == key:
                self.pending.remove(request)
                self.note("leave", request)
        for slot, request in enumerate(self.running):
            if request and request.key == key:
                self.running[slot] = None
                self.note("stop", request)

    def admit(self, out):
        """Gives waiting requests free slots, up to eight of them in one pass over their prompts."""
        free = [slot for slot, request in enumerate(self.running) if request is None]
        chosen = []
        while self.pending and len(chosen) < min(8, len(free)):
            request = self.pending.popleft()
            slot = free[len(chosen)]
            self.running[slot] = request
            chosen.append((slot, request))
            self.note("begin", request)
        if not chosen:
            return
        tokens = self.model.prefill([slot for slot, _ in chosen], [request.prompt for _, request in chosen])
        for (slot, request), token in zip(chosen, tokens):
            self.give(slot, request, token, out)

    def step(self, out):
        tokens, places = [0] * self.slots, [0] * self.slots
        for slot, request in enumerate(self.running):
            if request:
                tokens[slot], places[slot] = request.last, len(request.prompt) + request.made - 1
        made = self.model.decode(tokens, places)
        self.steps += 1
        for slot, request in enumerate(self.running):
            if request:
                self.give(slot, request, made[slot], out)

    def give(self, slot, request, token, out):
        request.last = token
        request.made += 1
        finished = request.made >= request.most
        out.append((request.key, token, finished))
        if finished:
            self.running[slot] = None
            self.note("end", request)

    def note(self, event, request):
        line = {"at": time.time(), "event": event, "key": request.key, "made": request.made, **request.about}
        print(json.dumps(line), file=self.log)


class Request:
    def __init__(self, key, prompt, most, about):
        self.key, self.prompt, self.most, self.about = key, prompt, most, about
        self.made, self.last = 0, 0


class Model:
    """Llama's layers: RMS norm, rotary positions, grouped keys and values, gated feed-forward. The cache is static."""

    def __init__(self, torch, options):
        width, self.layers, self.heads, self.groups, self.size, feed, self.vocabulary = SIZES[options.size]
        self.torch, self.device = torch, torch.device(options.device)
        self.slots, self.length = options.slots, options.length
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        random = torch.Generator(self.device).manual_seed(1)
        self.parameters = 0

        def weight(rows, columns):
            w = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
            w.normal_(0, columns**-0.5, generator=random)
            self.parameters += rows * columns
            return w

        self.embedding = weight(self.vocabulary, width)
        self.blocks = [
            (
                weight((self.heads + 2 * self.groups) * self.size, width),
                weight(width, self.heads * self.size),
                weight(2 * feed, width),
                weight(width, feed),
            )
            for _ in range(self.layers)
        ]
        self.head = weight(self.vocabulary, width)
        self.norm = torch.ones(width, device=self.device, dtype=self.dtype)
        shape = (self.layers, self.slots, self.groups, self.length, self.size)
        self.keys = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.values = torch.zeros(shape, device=self.device, dtype=self.dtype)
        half = torch.arange(0, self.size, 2, device=self.device, dtype=torch.float32)
        angles = torch.outer(torch.arange(self.length, device=self.device).float(), 500000.0 ** (-half / self.size))
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.rows = torch.arange(self.slots, device=self.device)
        self.columns = torch.arange(self.length, device=self.device)
        self.given = torch.zeros(2, self.slots, device=self.device, dtype=torch.long)
        self.graph = None

    def prepare(self):
        """Warms the kernels up and, on a GPU, records a step as a graph, so that one launch runs it."""
        for rows in (1, 8):
            self.prefill(list(range(min(rows, self.slots))), [[1] * 32] * min(rows, self.slots))
        if self.device.type != "cuda":
            return
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.decode_all()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.made = self.decode_all()
        self.graph = graph
        torch.cuda.synchronize()

    def decode(self, tokens, places):
        """One step of all slots: each slot's last token at its place. Slots without a request compute in vain."""
        self.given.copy_(self.torch.tensor([tokens, places]))
        if self.graph is None:
            return self.decode_all().tolist()
        self.graph.replay()
        return self.made.tolist()

    def decode_all(self):
        attention = self.torch.nn.functional.scaled_dot_product_attention
        tokens, places = self.given
        share = self.heads // self.groups
        hidden = self.torch.zeros(self.slots, self.length, device=self.device, dtype=self.dtype)
        hidden.masked_fill_(self.columns > places[:, None], float("-inf"))
        hidden = hidden[:, None, None, :].expand(self.slots, self.groups, share, self.length)
        cos, sin = self.cos[places][:, None], self.sin[places][:, None]

        def attend(layer, q, k, v):
            keys, values = self.keys[layer], self.values[layer]
            keys[self.rows, :, places] = turned(self.torch, k, cos, sin)
            values[self.rows, :, places] = v
            # The heads of a group see the same keys: they go as rows of one query.
            q = turned(self.torch, q, cos, sin).view(self.slots, self.groups, share, self.size)
            return attention(q, keys, values, attn_mask=hidden).reshape(self.slots, self.heads * self.size)

        return self.forward(tokens, attend)

    def prefill(self, slots, prompts):
        """Runs the prompts, padded to one length, fills the slots' caches, and returns the first token of each."""
        torch = self.torch
        longest = -(-max(len(p) for p in prompts) // 32) * 32
        tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=self.device)
        lasts = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        into = torch.tensor(slots, device=self.device)
        count = len(prompts)
        cos, sin = self.cos[:longest, None], self.sin[:longest, None]
        share = self.heads // self.groups

        def attend(layer, q, k, v):
            k = turned(torch, k.view(count, longest, self.groups, self.size), cos, sin).transpose(1, 2)
            v = v.view(count, longest, self.groups, self.size).transpose(1, 2)
            q = turned(torch, q.view(count, longest, self.heads, self.size), cos, sin).transpose(1, 2)
            self.keys[layer][into, :, :longest] = k
            self.values[layer][into, :, :longest] = v
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(count * longest, self.heads * self.size)

        ends = torch.arange(count, device=self.device) * longest + lasts
        return self.forward(tokens.flatten(), attend, ends).tolist()

    def forward(self, tokens, attend, only=None):
        """Returns the likeliest next token of each row, or of the rows in only."""
        functional = self.torch.nn.functional
        x = self.embedding[tokens]
        split = (self.heads * self.size, self.groups * self.size, self.groups * self.size)
        for layer, (qkv, out, up, down) in enumerate(self.blocks):
            q, k, v = (functional.linear(self.normed(x), qkv)).split(split, dim=-1)
            q = q.view(-1, self.heads, self.size)
            k, v = k.view(-1, self.groups, self.size), v.view(-1, self.groups, self.size)
            x = x + functional.linear(attend(layer, q, k, v), out)
            gate, value = functional.linear(self.normed(x), up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * value, down)
        if only is not None:
            x = x[only]
        return functional.linear(self.normed(x), self.head).argmax(dim=-1)

    def normed(self, x):
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm, 1e-5)


def turned(torch, x, cos, sin):
    """Rotary positions: turns the two halves of each head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def check(options):
    """Compares steps with passes over the whole text, which give the same tokens but for rounding, and times both."""
    import torch

    with torch.inference_mode():
        model = Model(torch, options)
        model.prepare()
        text = list(range(1, 21))
        made = model.prefill([0], [text])
        idle = [0] * (options.slots - 1)
        for _ in range(24):
            made.append(model.decode([made[-1], *idle], [len(text) + len(made) - 1, *idle])[0])
        again = [model.prefill([1], [text + made[:n]])[0] for n in range(len(made))]
        same = sum(a == b for a, b in zip(made, again))
        print(f"{model.parameters / 1e9:.2f} billion parameters; {same} of {len(made)} tokens are the same by steps "
              f"and by one pass; {len(set(made))} different tokens")
        full = [options.length - 1] * options.slots
        for name, run in {
            f"step of {options.slots} slots": lambda: model.decode(full, full),
            "8 prompts of 32 tokens": lambda: model.prefill(list(range(min(8, options.slots))),
                                                            [text] * min(8, options.slots)),
        }.items():
            began = time.monotonic()
            for _ in range(20):
                run()
            print(f"{name}: {(time.monotonic() - began) / 20 * 1000:.2f} ms")


# ---------------------------------------------------------------- the server


class Server:
    """Speaks the protocol, and passes requests to the engine."""

    def __init__(self, options, conn):
        self.options, self.conn = options, conn
        self.queues = {}  # of tokens, by the key of the request
        self.keys = itertools.count(1)
        self.tokens, self.ended, self.steps = 0, 0, 0

    def receive(self):
        """Called where the engine has sent something: spreads the tokens of a step over the requests."""
        while self.conn.poll():
            _, out, self.steps = self.conn.recv()
            for key, token, finished in out:
                self.tokens += 1
                self.ended += finished
                if queue := self.queues.get(key):
                    queue.put_nowait((token, finished))

    async def chat(self, request):
        from aiohttp import web

        try:
            body = await request.json()
            prompt = prompt_of(body["messages"])[: self.options.length // 2]
            most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 128)
        except (ValueError, KeyError, TypeError) as error:
            return web.json_response({"error": {"message": f"bad request: {error}"}}, status=400)
        most = max(1, min(most, self.options.length - len(prompt)))
        key = next(self.keys)
        about = {"entry": request.headers.get("Penstock-Entry", ""), "user": str(body.get("user", ""))}
        about["run"] = request.headers.get("Penstock-Token", "")
        queue = self.queues[key] = asyncio.Queue()
        self.conn.send(("add", key, prompt, most, about))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": most, "total_tokens": len(prompt) + most}
        ended = False
        try:
            answer = self.streamed(request, body, queue, usage) if body.get("stream") else self.whole(queue, usage)
            answer = await answer
            ended = True
            return answer
        finally:
            del self.queues[key]
            if not ended:  # the connection was closed
                self.conn.send(("drop", key))

    async def whole(self, queue, usage):
        from aiohttp import web

        text = ""
        while True:
            token, finished = await queue.get()
            text += letter(token)
            if finished:
                break
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        return web.json_response({"object": "chat.completion", "model": self.options.size, "choices": [choice],
                                  "usage": usage})

    async def streamed(self, request, body, queue, usage):
        from aiohttp import web

        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await answer.prepare(request)
        head = '{"object":"chat.completion.chunk","model":"%s",' % self.options.size
        finished = False
        while not finished:
            token, finished = await queue.get()
            text = letter(token)
            while not queue.empty():  # the client is slower than the model
                token, finished = queue.get_nowait()
                text += letter(token)
            piece = '"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text
            await answer.write(f"data: {head}{piece}".encode())
        tail = f'data: {head}"choices":[{{"index":0,"delta":{{}},"finish_reason":"length"}}]}}\n\n'
        if (body.get("stream_options") or {}).get("include_usage"):
            tail += f'data: {head}"choices":[],"usage":{json.dumps(usage)}}}\n\n'
        await answer.write(f"{tail}data: [DONE]\n\n".encode())
        await answer.write_eof()
        return answer

    async def models(self, _):
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": self.options.size, "object": "model"}]})

    async def health(self, _):
        from aiohttp import web

        active = min(len(self.queues), self.options.slots)
        return web.json_response({
            "status": "ok", "active_jobs": active, "max_jobs": self.options.slots,
            "queued": len(self.queues) - active, "tokens": self.tokens, "ended": self.ended, "steps": self.steps,
        })


def prompt_of(messages):
    """A prompt's tokens are the bytes of its texts: the weights are random, so no tokenizer would make sense."""
    text = "".join(str(message["content"]) for message in messages)
    return list(text.encode()) or [0]


def letter(token):
    return chr(ord("a") + token % 26)


async def serve(options, conn):
    from aiohttp import web

    server = Server(options, conn)
    asyncio.get_running_loop().add_reader(conn.fileno(), server.receive)
    app = web.Application(client_max_size=1 << 22)
    app.add_routes([
        web.post("/v1/chat/completions", server.chat), web.get("/v1/models", server.models),
        web.get("/health", server.health),
    ])
    # A handler is cancelled when its client closes the connection: that is what ends a run.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    host, port = options.listen.rsplit(":", 1)
    site = web.TCPSite(runner, host, int(port))
    await site.start()
    print("listening on %s:%d" % site._server.sockets[0].getsockname()[:2], flush=True)
    await asyncio.Event().wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:8000")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--slots", type=int, default=64, help="requests that are computed at once")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a slot; a multiple of 32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--log", default="", help="file for a JSON line whenever a request arrives, begins or ends")
    parser.add_argument("--check", action="store_true", help="check the model, time it, and end")
    options = parser.parse_args()
    if options.check:
        check(options)
        return
    context = multiprocessing.get_context("spawn")
    conn, engine_conn = context.Pipe()
    process = context.Process(target=engine_main, args=(engine_conn, options.log, options), daemon=True)
    process.start()
    engine_conn.close()
    print("engine:", conn.recv()[1], flush=True)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(options, conn))
    else:
        uvloop.run(serve(options, conn))


if __name__ == "__main__":
    main()
