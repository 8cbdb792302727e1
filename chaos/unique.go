package main

import (
	"strconv"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// uniqueQueue is that of a model whose entries have unique keys. Its entries run for so long that about half of the
// pushes of a key are duplicates.
const uniqueQueue = "unique"

// unique makes the next push with a unique key. Half of the keys have one entry until it ends, the others until it
// starts. With a key of the others it is three pushes: of an entry for a time to come, one while that waits, which is a
// duplicate, and one while it runs, which is not.
func (l *load) unique(p *judge.Push, in payload, random int) func() {
	policy := []string{"while_active", "while_queued"}[random%2]
	p.Queue, p.Unique = uniqueQueue, policy+" "+strconv.Itoa(random/2%3)
	p.WhileActive = policy == "while_active"
	in.MS = 300 + random%900
	body := map[string]any{"unique_key": p.Unique, "unique_policy": policy}
	push := func(p *judge.Push) {
		in.Op = p.Op
		body["payload"] = in
		l.push(p, body)
	}
	if p.WhileActive {
		return func() { push(p) }
	}
	waiting, running := *p, *p
	waiting.Op, running.Op = l.ops.Add(1), l.ops.Add(1)
	return func() {
		body["due_at"] = time.Now().Add(time.Duration(700+random%900) * time.Millisecond)
		push(p)
		delete(body, "due_at")
		push(&waiting)
		l.worker.awaitCall(p.Op, startAwaited)
		push(&running)
	}
}

// startAwaited is how long a client waits for the start of the entry that it pushed. A duplicate does not start.
const startAwaited = 5 * time.Second

// ratedQueue is that of a model whose entries start at a rate: so many at once, and so many a second.
const (
	ratedQueue = "rated"
	ratedBurst = 2
	ratedRate  = 3
	ratedPush  = 7 // entries that are pushed together
)

// rated makes the next push of several entries to that queue, more than may start at once. The pause before the next
// one is long enough for the bucket to be full, and for one that overflows to have more.
func (l *load) rated(first *judge.Push, in payload) func() {
	pushes := []*judge.Push{first}
	for len(pushes) < ratedPush {
		next := *first
		next.Op = l.ops.Add(1)
		pushes = append(pushes, &next)
	}
	return func() {
		for _, p := range pushes {
			p.Queue, in.Op = ratedQueue, p.Op
			l.push(p, map[string]any{"payload": in})
			time.Sleep(time.Millisecond)
		}
	}
}
