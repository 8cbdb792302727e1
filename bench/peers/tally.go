package peers

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Tally counts the entries that a contender's process handles, and says when its step is over: as soon as it has
// handled what is expected of it or, where processes share a step, when the parent says so, which adds up what all did.
type Tally struct {
	handled  atomic.Int64
	expected atomic.Int64 // negative while it is not known
	shared   bool
	once     sync.Once
	over     chan struct{}
}

func newTally(shared bool) *Tally {
	t := &Tally{shared: shared, over: make(chan struct{})}
	t.expected.Store(-1)
	return t
}

// Add counts n entries, whose handlers have begun.
func (t *Tally) Add(n int) {
	handled, expected := t.handled.Add(int64(n)), t.expected.Load()
	if !t.shared && expected >= 0 && handled >= expected {
		t.finish()
	}
}

// Expect says how many entries the step has, of which other processes may handle some. It is called once.
func (t *Tally) Expect(n int) {
	t.expected.Store(int64(n))
	t.Add(0)
}

// Handled is how many entries were counted so far.
func (t *Tally) Handled() int { return int(t.handled.Load()) }

// Over is closed when no entry of the step is left.
func (t *Tally) Over() <-chan struct{} { return t.over }

func (t *Tally) finish() { t.once.Do(func() { close(t.over) }) }

// Progress is what a process that shares a step tells its parent.
type Progress struct {
	Handled  int64 `json:"handled"`
	Expected int64 `json:"expected"` // negative while it is not known
}

// progressEvery is how often a process tells its progress, where there is any.
const progressEvery = 5 * time.Millisecond

// follow tells the parent of the progress until the parent says that all is done.
func (t *Tally) follow(in *bufio.Reader, out io.Writer) error {
	told := make(chan error, 1)
	go func() {
		_, err := in.ReadString('\n')
		t.finish()
		told <- err
	}()
	ticks := time.NewTicker(progressEvery)
	defer ticks.Stop()
	last := Progress{Expected: -1}
	for {
		select {
		case err := <-told:
			if err != nil {
				return fmt.Errorf("wait for the end of the step: %w", err)
			}
			return nil
		case <-ticks.C:
		}
		now := Progress{Handled: t.handled.Load(), Expected: t.expected.Load()}
		if now == last {
			continue
		}
		if err := json.NewEncoder(out).Encode(map[string]Progress{"progress": now}); err != nil {
			return fmt.Errorf("tell the progress: %w", err)
		}
		last = now
	}
}
