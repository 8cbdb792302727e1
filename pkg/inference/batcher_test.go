package inference

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"

	"pgregory.net/rapid"
)

func member(entry, shape string, tokens int64, at time.Time) worker.Member {
	return worker.Member{Entry: entry, Shape: shape, Tokens: tokens, Bytes: 10 * tokens, At: at}
}

func entries(batch []worker.Member) []string {
	var names []string
	for _, m := range batch {
		names = append(names, m.Entry)
	}
	return names
}

// out takes the batch that an idle slot is given to, nil if none should leave.
func out(f *batcher, now time.Time) batch {
	due := f.Due(now)
	if len(due) == 0 {
		return nil
	}
	batch := slices.Clone(due[0])
	f.Leave(due[0])
	return batch
}

func TestBatchLeavesWhenItsOldestMemberHasWaited(t *testing.T) {
	now := clock()
	f := newBatcher(worker.BatchLimits{Items: 9, Wait: worker.Seconds(100 * time.Millisecond)})
	for i := range 8 { // somebody joins every 5 ms, then every 14
		f.Add(member(fmt.Sprint(i), "s", 1, now.Add(time.Duration(i*14)*time.Millisecond)))
		if i < 7 && len(f.Due(now.Add(time.Duration(i*14+9)*time.Millisecond))) != 0 {
			t.Error("left although somebody had just joined")
		}
	}
	if at, waiting := f.Next(); !waiting || !at.Equal(now.Add(100*time.Millisecond)) {
		t.Errorf("next batch at %v, want 100 ms after the oldest member", at)
	}
	if b := out(f, now.Add(100*time.Millisecond)); len(b) != 8 || f.Len() != 0 {
		t.Errorf("%d left, %d stayed", len(b), f.Len())
	}
}

func TestBatchLeavesEarlyForAnIdleSlotWhenNobodyJoins(t *testing.T) {
	now := clock()
	f := newBatcher(worker.BatchLimits{Items: 4, Wait: worker.Seconds(100 * time.Millisecond)})
	f.Add(member("a", "wide", 1, now.Add(time.Millisecond)))
	f.Add(member("b", "tall", 1, now))
	if b := out(f, now.Add(9*time.Millisecond)); b != nil {
		t.Errorf("%v left within a tenth of the wait", entries(b))
	}
	for _, want := range []string{"b", "a"} { // the oldest first
		if b := out(f, now.Add(11*time.Millisecond)); !slices.Equal(entries(b), []string{want}) {
			t.Errorf("got %v, want %s", entries(b), want)
		}
	}
	if b := out(f, now.Add(time.Hour)); b != nil {
		t.Error("a batch of nobody")
	}
}

func TestBatchLeavesWhenFull(t *testing.T) {
	now := clock()
	for _, c := range []struct {
		name   string
		limits worker.BatchLimits
		first  int // members in the first batch out of 3 of 10 tokens and 100 bytes
	}{
		{"items", worker.BatchLimits{Items: 2}, 2},
		{"tokens", worker.BatchLimits{Items: 9, Tokens: 25}, 2},
		{"tokens reached exactly", worker.BatchLimits{Items: 9, Tokens: 20}, 2},
		{"bytes", worker.BatchLimits{Items: 9, Bytes: 150}, 1},
		{"no batches", worker.BatchLimits{}, 1},
	} {
		f := newBatcher(c.limits)
		for i := range 3 {
			f.Add(member(fmt.Sprint(i), "s", 10, now))
		}
		if b := out(f, now); len(b) != c.first {
			t.Errorf("%s: first batch has %d members, want %d", c.name, len(b), c.first)
		}
	}
}

func TestOversizedAndLonelyMembersTravelAlone(t *testing.T) {
	now := clock()
	f := newBatcher(worker.BatchLimits{Items: 4, Tokens: 10})
	f.Add(member("small", "s", 1, now))
	f.Add(member("huge", "s", 99, now))
	f.Add(worker.Member{Entry: "lonely", Shape: "t", Alone: true, At: now})
	for _, want := range []string{"small", "huge", "lonely"} {
		if b := out(f, now); !slices.Equal(entries(b), []string{want}) {
			t.Errorf("got %v, want %s", entries(b), want)
		}
	}
}

func TestWithdrawnMemberIsNotSent(t *testing.T) {
	now := clock()
	f := newBatcher(worker.BatchLimits{Items: 3})
	f.Add(member("a", "s", 1, now))
	f.Add(member("b", "s", 1, now))
	if !f.Withdraw("a") || f.Withdraw("a") || !f.Withdraw("b") {
		t.Error("withdrawing is not exact")
	}
	if f.Len() != 0 {
		t.Error("an empty batch stayed")
	}
}

// Nobody is lost or sent twice, limits hold, shapes do not mix and keep their order; and while a slot idles nobody
// waits longer than the limit, nor longer than Next says.
func TestBatchProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := worker.BatchLimits{
			Items: rapid.IntRange(0, 5).Draw(t, "items"), Tokens: rapid.Int64Range(0, 20).Draw(t, "tokens"),
			Bytes: rapid.Int64Range(0, 200).Draw(t, "bytes"), Wait: worker.Seconds(50 * time.Millisecond),
		}
		f, now := newBatcher(limits), clock()
		added, sent, lastOfShape := 0, map[string]bool{}, map[string]int{}
		check := func(batch batch) {
			var tokens, bytes int64
			for _, m := range batch {
				var number int
				if _, err := fmt.Sscan(m.Entry, &number); err != nil {
					t.Fatal(err)
				}
				switch {
				case sent[m.Entry]:
					t.Fatalf("%s sent twice", m.Entry)
				case m.Shape != batch[0].Shape:
					t.Fatal("shapes mixed")
				case number <= lastOfShape[m.Shape]:
					t.Fatalf("%s overtook %d", m.Entry, lastOfShape[m.Shape])
				case now.Sub(m.At) > limits.Wait.Duration():
					t.Fatalf("%s waited %s", m.Entry, now.Sub(m.At))
				}
				sent[m.Entry], lastOfShape[m.Shape] = true, number
				tokens, bytes = tokens+m.Tokens, bytes+m.Bytes
			}
			if len(batch) > 1 && (len(batch) > limits.Items || exceeds(tokens, limits.Tokens) || exceeds(bytes, limits.Bytes)) {
				t.Fatalf("batch of %d, %d tokens, %d bytes exceeds %+v", len(batch), tokens, bytes, limits)
			}
		}
		advance := func(to time.Time) {
			for {
				at, waiting := f.Next()
				if !waiting || at.After(to) {
					now = to
					return
				}
				now = at
				batch := out(f, now)
				if batch == nil {
					t.Fatal("Next promised a batch that was not due")
				}
				check(batch)
			}
		}
		for range rapid.IntRange(0, 100).Draw(t, "steps") {
			advance(now.Add(time.Duration(rapid.IntRange(0, 30).Draw(t, "pause")) * time.Millisecond))
			added++
			f.Add(member(fmt.Sprint(added), rapid.SampledFrom([]string{"x", "y"}).Draw(t, "shape"), rapid.Int64Range(0, 25).Draw(t, "size"), now))
		}
		advance(now.Add(time.Hour))
		if len(sent) != added || f.Len() != 0 {
			t.Fatalf("%d added, %d sent, %d stayed", added, len(sent), f.Len())
		}
	})
}

// Len counts the waiting members.
func (b *batcher) Len() int {
	n := 0
	for _, members := range b.shapes {
		n += len(members)
	}
	return n
}
