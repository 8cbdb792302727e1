package guard

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// The ways of an entry whose cost is guarded.

func payload(i int) json.RawMessage { return json.RawMessage(fmt.Sprintf(`{"n": %d}`, 10_000+i)) }

func (b *bed) pushSingle(n int) {
	for i := range n {
		_, err := b.queue.Push(b.ctx, invalidation.Push{Payload: payload(i)})
		b.must(err)
	}
}

// Groups have a flow of their own: a lane that has held groups is claimed from in another way for a while.
var solo, grouped = invalidation.Lane{Priority: 1}, invalidation.Lane{Priority: 1, Flow: "groups"}

// pushBulk pushes in batches of 1000; with a group above 0, so many entries in a row have the same lock key.
func (b *bed) pushBulk(n, group int) {
	for first := 0; first < n; first += 1000 {
		batch := make([]invalidation.Push, min(1000, n-first))
		for i := range batch {
			batch[i].Payload = payload(i)
			if group > 0 {
				batch[i].LockKey, batch[i].Flow = fmt.Sprint("group-", (first+i)/group), grouped.Flow
			}
		}
		_, err := b.queue.Push(b.ctx, batch...)
		b.must(err)
	}
}

// drain claims up to 500 locks of a lane at a time and ends all entries they cover.
func (b *bed) drain(lane invalidation.Lane, n int) {
	var mark int64
	for ended := 0; ended < n; {
		b.claims++
		claimed, err := b.queue.Claim(b.ctx, invalidation.ClaimRequest{Node: 1, ClaimID: b.claims, Lane: lane, From: mark, Limit: 500})
		b.must(err)
		mark = claimed.LowWater
		var endings []invalidation.Ending
		for _, l := range claimed.Locks {
			for i := range l.Entries {
				e := invalidation.Done(l, l.Entries[i].ID, nil, 0)
				e.Last = i == len(l.Entries)-1
				endings = append(endings, e)
			}
		}
		ours, err := b.queue.Settle(b.ctx, 1, endings)
		b.must(err)
		if len(ours) != len(claimed.Locks) || len(ours) == 0 {
			b.Fatalf("settled %d of %d locks after %d of %d entries", len(ours), len(claimed.Locks), ended, n)
		}
		ended += len(endings)
	}
}

// serve runs a node with hints while body runs.
func (b *bed) serve(config tasknode.Config, body func()) {
	server := b.pool.Config().ConnConfig
	db, beats := b.open(server, 3), b.open(server, 1)
	b.nodePools = append(b.nodePools, db, beats)
	config.Log = slog.New(slog.DiscardHandler)
	b.node = tasknode.New(config, db, beats)
	b.node.Handle("bench", invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil }))
	hinter := invalidation.NewHinter(b.pool, 0)
	listener := invalidation.NewListener(invalidation.ListenConfig{Conn: server.Copy(), Wake: b.node.Wake, Log: config.Log})
	plain := b.queue
	b.queue = b.queue.Hinting(hinter)
	ctx, stop := context.WithCancel(b.ctx)
	ended := make(chan error, 3)
	for _, run := range []func(context.Context) error{b.node.Run, hinter.Run, listener.Run} {
		go func() { ended <- run(ctx) }()
	}
	for end := time.Now().Add(time.Minute); !listener.Status().Connected; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatal("the listener hears nothing after a minute")
		}
	}
	body()
	stop()
	for range 3 {
		b.must(<-ended)
	}
	b.queue = plain
}

// await waits until the node has ended n entries.
func (b *bed) await(n int) {
	for end := time.Now().Add(time.Minute); b.node.Stats().Settled.Load() < int64(n); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			b.Fatalf("the node ended %d of %d entries in a minute", b.node.Stats().Settled.Load(), n)
		}
	}
}

// lonePause is the time before a lone push, twice that in which a Hinter may hint at a queue once: behind closer pushes
// it sends some hints by themselves, in a transaction more, and how many these are depends on how fast entries end.
const lonePause = 20 * time.Millisecond

// pushLone pushes entries into an idle queue, each a while after the one before has ended.
func (b *bed) pushLone(n int) {
	was := int(b.node.Stats().Settled.Load())
	for i := range n {
		time.Sleep(lonePause)
		b.pushSingle(1)
		b.await(was + i + 1)
	}
}
