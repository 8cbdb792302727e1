package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Whoever may push to a queue with this Handler chooses payloads, and batches have sequential ids. A payload that names
// another queue's batch reads and ends nothing of it.
func TestPayloadThatNamesAnotherQueuesBatchReadsAndEndsNothing(t *testing.T) {
	b := newBed(t)
	running := b.create(Batch{Items: numbers(10), PartSize: 5, CompletionQueue: "parts"})
	b.step()
	splitting := b.create(Batch{Query: "SELECT 1 AS n"})
	ending := b.create(Batch{Items: numbers(1), CompletionQueue: "parts"})
	b.step()
	for b.count(`SELECT count(*) FROM penstock.batch WHERE id = $1 AND status = 'ending'`, ending) == 0 {
		for _, l := range b.claim(1) {
			if l.Entries[0].Name == fmt.Sprintf("batch:%d", ending) {
				b.runLock(l)
			}
		}
		b.step()
	}
	mine, err := invalidation.Create(b.ctx, b.pool, "mine", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var read []string
	handler := Handler(b.pool, Work{
		Map: func(_ context.Context, p Part) (json.RawMessage, error) {
			read = append(read, fmt.Sprintf("items %s of batch %d", p.Items, p.Batch))
			return json.RawMessage(`"forged"`), nil
		},
		Reduce: func(_ context.Context, results iter.Seq2[json.RawMessage, error]) (json.RawMessage, error) {
			for r, err := range results {
				if err != nil {
					return nil, err
				}
				read = append(read, fmt.Sprintf("result %s", r))
			}
			return json.RawMessage(`"forged"`), nil
		},
	})
	for i, payload := range []string{
		fmt.Sprintf(`{"batch": %d, "step": "part", "part": 2}`, running),
		fmt.Sprintf(`{"batch": %d, "step": "split"}`, splitting),
		fmt.Sprintf(`{"batch": %d, "step": "end", "status": "done"}`, ending),
	} {
		if _, err := mine.Push(b.ctx, invalidation.Push{Payload: json.RawMessage(payload)}); err != nil {
			t.Fatal(err)
		}
		c, err := mine.Claim(b.ctx, invalidation.ClaimRequest{Node: here, ClaimID: int32(1000 + i), Lane: invalidation.Lane{Priority: 1}, Limit: 1})
		if err != nil || len(c.Locks) != 1 {
			t.Fatalf("claimed %d locks: %v", len(c.Locks), err)
		}
		r := &invalidation.Run{Queue: mine, Entry: c.Locks[0].Entries[0], Lock: c.Locks[0], Node: here}
		if _, err := handler.Handle(b.ctx, r); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v, want ErrNotFound", payload, err)
		}
		// The schema does not take it either, from a handler that does not ask.
		var took bool
		err = b.pool.QueryRow(b.ctx, `SELECT penstock.finish_batch_part($1, 2, $2, $3, $4, '"forged"')`,
			running, mine.ID, r.Lock.Key, r.Lock.Token).Scan(&took)
		if err != nil || took {
			t.Errorf("a part of another queue was ended: %t, %v", took, err)
		}
	}
	if len(read) > 0 {
		t.Errorf("the handler was given %v", read)
	}
	if n := b.count(`SELECT count(*) FROM penstock.batch_part WHERE batch_id = $1 AND ended_at IS NOT NULL`, running); n != 0 {
		t.Errorf("%d parts of the batch were ended", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.batch WHERE result IS NOT NULL OR id = $1 AND status <> 'splitting'`, splitting); n != 0 {
		t.Error("a batch was split, or got a result")
	}
}

// A query is one statement that reads: it comes over HTTP, and runs with the rights of a node.
func TestQueryOfABatchIsOneStatementThatReads(t *testing.T) {
	b := newBed(t)
	if _, err := b.pool.Exec(b.ctx, `CREATE TABLE public.victim (n integer)`); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{
		`SELECT 1) q; DROP TABLE public.victim; SELECT * FROM (SELECT 1`,
		`SELECT 1) q) TO STDOUT; DROP TABLE public.victim; COPY (SELECT * FROM (SELECT 1`,
		`SELECT 1; DROP TABLE public.victim`,
		`DELETE FROM public.victim RETURNING n`,
		`INSERT INTO public.victim VALUES (1) RETURNING n`,
		`WITH gone AS (DELETE FROM public.victim RETURNING n) SELECT n FROM gone`,
		`DROP TABLE public.victim`, `COPY public.victim TO PROGRAM 'true'`, `SELECT 1 --) q; DROP TABLE public.victim` + "\n" + `; DROP TABLE public.victim`, `SELECT` + ` 1 INTO public.stolen`, ``,
	} {
		_, err := Create(b.ctx, b.pool, Batch{Name: "b", Queue: "parts", Query: query}, invalidation.By{Actor: "ada", Reason: "test"})
		if query != "" && !errors.Is(err, invalidation.ErrInvalid) {
			t.Errorf("%q: %v, want ErrInvalid", query, err)
		}
	}
	for _, query := range []string{
		`SELECT n FROM public.victim;`, `VALUES (1), (2)`, `TABLE public.victim`, `WITH a AS (SELECT 1 AS n) SELECT n FROM a -- a comment`, `SELECT * FROM made_later`,
	} {
		if _, err := Create(b.ctx, b.pool, Batch{Name: "b", Queue: "parts", Query: query}, invalidation.By{Actor: "ada", Reason: "test"}); err != nil {
			t.Errorf("%q: %v", query, err)
		}
	}
	if n := b.count(`SELECT count(*) FROM pg_class WHERE relname IN ('victim', 'stolen')`); n != 1 {
		t.Errorf("%d of the tables are there", n)
	}
}
