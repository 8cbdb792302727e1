package api

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// streamBase is what a stream holds whatever comes: buffers of its connection, of gzip and of short lines.
	streamBase = 512 << 10
	// streamBytes bounds what a stream holds: a chunk that is pushed, one that is read meanwhile, and a long line as it
	// came and as it was decoded.
	streamBytes = 2*chunkBytes + 2*lineBytesMax
	// streamPatience is how long a stream that holds no line waits for bytes that others have.
	streamPatience = 5 * time.Second
	streamRetry    = 50 * time.Millisecond
)

// streamMemory is how many bytes all streams of pushes together may hold.
type streamMemory struct{ *sharedMemory }

func newStreamMemory(bytes int64) streamMemory { return streamMemory{newSharedMemory(bytes)} }

// streamShare is what one stream holds of the memory: its base to its end, and what is beyond it while lines need it.
type streamShare struct {
	memory streamMemory // zero: the stream is bounded by streamBytes alone
	token  string

	mu     sync.Mutex
	buffer int64 // bytes of the line that is being read
	lines  int64 // bytes of lines that were read and have no answer
	closed bool  // a reader that goes on takes and gives nothing more
	freed  chan struct{}
}

var errStreamClosed = errors.New("the stream has ended")

// enter takes the base of a stream of the caller. close gives back all that the stream holds.
func (b streamMemory) enter(c caller) (*streamShare, error) {
	token := c.holder()
	if err := b.take(token, streamBase); err != nil {
		return nil, err
	}
	return &streamShare{memory: b, token: token, freed: make(chan struct{}, 1)}, nil
}

func (s *streamShare) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.memory.give(s.token, streamBase+s.borrowed())
	s.buffer, s.lines, s.closed = 0, 0, true
}

// borrowed returns the bytes beyond the base.
func (s *streamShare) borrowed() int64 { return max(0, s.buffer+s.lines-streamBase) }

// grow takes n bytes for the line that is being read.
func (s *streamShare) grow(ctx context.Context, n int64) error { return s.wait(ctx, n, 0) }

// add takes the bytes of a line that was read.
func (s *streamShare) add(ctx context.Context, n int64) error { return s.wait(ctx, 0, n) }

// wait takes bytes as soon as the stream may hold them. Lines of the stream itself give theirs back when they have been
// pushed; without any, it waits for other streams no longer than streamPatience.
func (s *streamShare) wait(ctx context.Context, buffer, lines int64) error {
	held, err := s.try(buffer, lines)
	if err == nil {
		return nil
	}
	retry := time.NewTicker(streamRetry)
	defer retry.Stop()
	for since := time.Now(); held > 0 || time.Since(since) < streamPatience; {
		select {
		case <-s.freed:
		case <-retry.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if held > 0 {
			since = time.Now()
		}
		if held, err = s.try(buffer, lines); err == nil {
			return nil
		}
	}
	return err
}

// try takes bytes, or returns why not and how many bytes the lines hold that will be given back.
func (s *streamShare) try(buffer, lines int64) (held int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, now := s.borrowed(), max(0, s.buffer+buffer+s.lines+lines-streamBase)
	switch {
	case s.closed:
		return 0, errStreamClosed
	case s.lines > 0 && s.buffer+buffer+s.lines+lines > streamBytes:
		return s.lines, errBusy
	case s.memory.sharedMemory == nil:
	default:
		if err := s.memory.take(s.token, now-before); err != nil {
			return s.lines, err
		}
	}
	s.buffer, s.lines = s.buffer+buffer, s.lines+lines
	return s.lines, nil
}

// shrink gives back n bytes of the line that was read last.
func (s *streamShare) shrink(n int64) { s.give(n, 0) }

// done gives back the bytes of lines that have their answer.
func (s *streamShare) done(n int64) { s.give(0, n) }

func (s *streamShare) give(buffer, lines int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	before := s.borrowed()
	s.buffer, s.lines = s.buffer-buffer, s.lines-lines
	if s.memory.sharedMemory != nil {
		s.memory.give(s.token, before-s.borrowed())
	}
	select {
	case s.freed <- struct{}{}:
	default:
	}
}
