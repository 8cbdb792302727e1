package worker

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"
)

// Chunk is a piece of a call's output log. Chunks of a run are numbered from 1 without gaps.
type Chunk struct {
	Seq  int
	Data []byte // whole server-sent events
}

// Sink stores output. Append is called by one goroutine at a time for a call,
// in order. A slow sink delays no stream: pieces that arrive meanwhile are put into
// larger chunks.
type Sink interface {
	Append(ctx context.Context, chunk Chunk) error
}

// Output is written in chunks of about this size, or after this long, whichever
// comes first: rows per token would drown the database.
const (
	chunkBytes    = 32 << 10
	chunkInterval = 500 * time.Millisecond
	firstInterval = 100 * time.Millisecond // so that a reader sees the first words at once
	closeMax      = 10 * time.Second       // for the sink to take the last chunk
	pendingMax    = 8 << 20                // bytes that wait for a sink before its log is given up
)

// ChunkBytesMax bounds a chunk, so that a sink which stores one chunk as one row need not split it.
const ChunkBytesMax = 1 << 20

// chunker is a buffer between the stream, which must not wait, and the sink.
type chunker struct {
	ctx     context.Context
	cancel  context.CancelFunc
	sink    Sink
	wake    chan struct{} // holds one: there is a full chunk, or the end
	stopped chan struct{} // closed when the writing goroutine is gone

	mu      sync.Mutex
	pending []byte
	closed  bool
	err     error
}

func newChunker(ctx context.Context, sink Sink) *chunker {
	// What was produced is written even if the call is being cancelled.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &chunker{
		ctx: ctx, cancel: cancel, sink: sink,
		wake: make(chan struct{}, 1), stopped: make(chan struct{}),
	}
	if sink == nil {
		close(c.stopped)
		return c
	}
	go c.run()
	return c
}

// Write takes a frame without ever waiting for the sink. A sink that falls behind by pendingMax bytes
// is given up: a log with a gap is worse than one that ends early.
func (c *chunker) Write(frame []byte) {
	if c.sink == nil {
		return
	}
	c.mu.Lock()
	if len(c.pending)+len(frame) > pendingMax && c.err == nil {
		c.err = errors.New("sink fell behind the stream")
	}
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.pending = append(c.pending, frame...)
	full := len(c.pending) >= chunkBytes
	c.mu.Unlock()
	if full {
		c.signal()
	}
}

// Close writes the rest and returns the first error of the sink.
func (c *chunker) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.signal()
	defer c.cancel()
	defer time.AfterFunc(closeMax, c.cancel).Stop()
	<-c.stopped
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *chunker) signal() {
	select {
	case c.wake <- struct{}{}:
	default: // it is awake already
	}
}

func (c *chunker) run() {
	defer close(c.stopped)
	seq := 0
	timer := time.NewTimer(firstInterval)
	defer timer.Stop()
	for {
		select {
		case <-c.wake:
		case <-timer.C:
			timer.Reset(chunkInterval)
		}
		data, closed := c.take()
		if len(data) > 0 {
			seq++
			c.append(Chunk{Seq: seq, Data: data})
		}
		if closed {
			return
		}
	}
}

func (c *chunker) take() ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	data := c.pending
	if len(data) > ChunkBytesMax { // the sink was slow: whole events, as many as fit
		if end := bytes.LastIndex(data[:ChunkBytesMax], []byte("\n\n")); end >= 0 {
			data = data[:end+2]
		}
	}
	if c.pending = c.pending[len(data):]; len(c.pending) > 0 {
		c.signal()
	}
	return data, c.closed && len(c.pending) == 0
}

// append stops writing after the first error: a log with a gap is worse than
// one that ends early.
func (c *chunker) append(chunk Chunk) {
	c.mu.Lock()
	broken := c.err != nil
	c.mu.Unlock()
	if broken {
		return
	}
	if err := c.sink.Append(c.ctx, chunk); err != nil {
		c.mu.Lock()
		c.err = err
		c.mu.Unlock()
	}
}
