package main

import (
	"encoding/json"
	"fmt"
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

// rated makes the next push of several entries to that queue, more than may start at once, in one request: they are in
// line together. The pause before the next one is long enough for the bucket to be full, and for one that overflows to
// have more.
func (l *load) rated(first *judge.Push, in payload) func() {
	pushes := []*judge.Push{first}
	for len(pushes) < ratedPush {
		next := *first
		next.Op = l.ops.Add(1)
		pushes = append(pushes, &next)
	}
	list := make([]map[string]payload, len(pushes))
	for i, p := range pushes {
		p.Queue, in.Op = ratedQueue, p.Op
		list[i] = map[string]payload{"payload": in}
	}
	return func() { l.pushTogether(pushes, list) }
}

// pushTogether accepts entries of one queue in one request, all or none.
func (l *load) pushTogether(pushes []*judge.Push, list []map[string]payload) {
	text, err := json.Marshal(list)
	if err != nil {
		return
	}
	called, first := time.Now(), pushes[0]
	var answer struct {
		Entries []struct {
			ID int64 `json:"id"`
		} `json:"entries"`
	}
	status := l.ask(first.Op, "/v1/queues/"+first.Queue+"/entries", fmt.Sprintf("op-%d", first.Op), text, &answer)
	for i, p := range pushes {
		p.Called, p.Returned, p.Refused = called, time.Now(), status/100 == 4
		if status/100 == 2 && i < len(answer.Entries) {
			p.Told, p.Entry = answer.Entries[i].ID != 0, answer.Entries[i].ID
		}
		l.record(p)
	}
}
