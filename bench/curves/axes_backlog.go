package curves

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// Axes lists all there are, in the order in which they run.
func Axes() []Axis {
	return []Axis{
		{"backlog", "In front of a backlog", "entries ready", (*Harness).backlog},
		{"states", "Beside entries that cannot run", "other entries", (*Harness).states},
		{"payload", "Payload size", "bytes of JSON", (*Harness).payload},
		{"keys", "Lock keys", "keys", (*Harness).keys},
		{"hotkey", "Beside a hot key", "entries of the hot key", (*Harness).hotKey},
		{"flows", "Flows", "flows", (*Harness).flows},
		{"nodes", "Nodes", "processes", (*Harness).nodes},
		{"threads", "Processing threads of one node", "threads", (*Harness).threads},
		{"held", "Under a transaction held open", "entries worked since it began", (*Harness).held},
		{"limits", "Limits", "limits of the queue", (*Harness).limits},
		{"hints", "Hints", "pushes a second", (*Harness).hints},
		{"pooler", "Through PgBouncer in transaction mode", "connections", (*Harness).pooler},
		{"node", "The node by itself", "", (*Harness).node},
	}
}

// backlog drains and times claims in front of more and more entries that wait.
func (h *Harness) backlog(ctx context.Context, add func(Point)) error {
	s, err := h.testbed(ctx, invalidation.Config{})
	if err != nil {
		return err
	}
	defer s.close()
	there := 0
	for _, size := range h.sizes([]int{1000, 10_000, 100_000}, []int{1000, 10_000, 100_000, 1_000_000, 10_000_000}) {
		took, err := s.push(ctx, size-there, 1000, solo)
		if err != nil {
			return err
		}
		filled := float64(size-there) / took.Seconds()
		there = size
		disk, err := s.disk(ctx)
		if err != nil {
			return err
		}
		times, err := s.claimTimes(ctx, usual, solo)
		if err != nil {
			return err
		}
		// What is drained is pushed before, behind the backlog: as much waits after the drain.
		// Enough of it that what the node hands back at the end, claimed but not begun, is little beside it.
		n := 3 * h.Entries
		if _, err := s.push(ctx, n, 1000, solo); err != nil {
			return err
		}
		o, err := s.drain(ctx, NodeConfig{}, 1, n)
		if err != nil {
			return err
		}
		there += n - o.Handled
		add(Point{X: count(size), Figures: o.costs().with(times,
			Figures{pushTitle: filled, diskTitle: disk / float64(size)})})
	}
	return nil
}

// disk is what entries and ready rows take, with their indexes.
func (s *testbed) disk(ctx context.Context) (bytes float64, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT pg_total_relation_size('penstock.entry_bench') + pg_total_relation_size('penstock.ready')`).Scan(&bytes)
	return bytes, err
}

// states drains and times claims beside entries that are failed, not due or disabled.
func (h *Harness) states(ctx context.Context, add func(Point)) error {
	sizes := h.sizes([]int{0, 100_000}, []int{0, 100_000, 1_000_000})
	for _, state := range []struct{ name, sql string }{
		{"failed", `INSERT INTO penstock.failure (queue_id, entry_id, created_at, priority, attempt, crashes, flow,
			       class, error, fingerprint, payload)
			SELECT $1, -i, now(), 1, 1, 0, '', 'error', 'bench', 'bench', '{}'
			  FROM generate_series($2::int + 1, $3::int) i`},
		{"not due", `INSERT INTO penstock.entry_bench (id, queue_id, status, priority, due_at, payload)
			SELECT -i, $1, 'initial', 1, now() + interval '1 day', '{}' FROM generate_series($2::int + 1, $3::int) i`},
		{"disabled", `INSERT INTO penstock.entry_bench (id, queue_id, status, priority, payload)
			SELECT -i, $1, 'pending', -1, '{}' FROM generate_series($2::int + 1, $3::int) i`},
	} {
		if err := h.besides(ctx, state.name, state.sql, sizes, add); err != nil {
			return fmt.Errorf("%s: %w", state.name, err)
		}
	}
	return nil
}

func (h *Harness) besides(ctx context.Context, series, sql string, sizes []int, add func(Point)) error {
	s, err := h.testbed(ctx, invalidation.Config{})
	if err != nil {
		return err
	}
	defer s.close()
	there := 0
	for _, size := range sizes {
		if err := s.exec(ctx, sql, s.queue.ID, there, size); err != nil {
			return err
		}
		there = size
		if _, err := s.push(ctx, h.Entries, 1000, solo); err != nil {
			return err
		}
		times, err := s.claimTimes(ctx, usual, solo)
		if err != nil {
			return err
		}
		o, err := s.drain(ctx, NodeConfig{}, 1, h.Entries)
		if err != nil {
			return err
		}
		add(Point{Series: series, X: count(size), Figures: o.costs().with(times)})
	}
	return nil
}

// payload pushes and drains entries of more and more bytes, which do not compress.
func (h *Harness) payload(ctx context.Context, add func(Point)) error {
	for _, size := range h.sizes([]int{50, 1000, 10_000}, []int{50, 200, 1000, 10_000, 100_000}) {
		s, err := h.testbed(ctx, invalidation.Config{})
		if err != nil {
			return err
		}
		n := min(h.Entries, max(500, 200_000_000/size))
		batch := min(1000, max(1, 8_000_000/size))
		took, err := s.push(ctx, n, batch, padded(size, 1))
		if err != nil {
			s.close()
			return err
		}
		o, err := s.drain(ctx, NodeConfig{}, 1, n)
		s.close()
		if err != nil {
			return err
		}
		add(Point{X: count(size), Figures: o.costs().with(Figures{pushTitle: float64(n) / took.Seconds()})})
	}
	return nil
}

// padded makes entries of so many bytes; with a group above 1, so many in a row have the same lock key.
// Each pad is another part of one random text, since making random text would cost more than pushing it.
func padded(size, group int) maker {
	var text strings.Builder
	for text.Len() < size+1<<16 {
		text.WriteString(rand.Text()) // 26 letters and digits, 130 bits
	}
	random, length := text.String(), max(0, size-len(`{"pad":""}`))
	return func(i int) invalidation.Push {
		from := i * 7919 % (len(random) - length)
		p := invalidation.Push{Payload: json.RawMessage(`{"pad":"` + random[from:from+length] + `"}`)}
		if group > 1 {
			p.LockKey = fmt.Sprint("key-", i/group)
		}
		return p
	}
}

// held drains round after round beside a transaction that holds a snapshot, and without one.
func (h *Harness) held(ctx context.Context, add func(Point)) error {
	rounds := h.sizes([]int{3}, []int{20})[0]
	for _, series := range []string{"held", "no transaction"} {
		if h.HeldFor > 0 && series != "held" {
			break // its first round is the comparison
		}
		s, err := h.testbed(ctx, invalidation.Config{})
		if err != nil {
			return err
		}
		err = s.age(ctx, series, rounds, add)
		s.close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *testbed) age(ctx context.Context, series string, rounds int, add func(Point)) error {
	if series == "held" {
		tx, err := s.pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(context.WithoutCancel(ctx))
		for _, sql := range []string{
			`SET LOCAL idle_in_transaction_session_timeout = 0`, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`,
			`SELECT pg_current_xact_id()`,
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return fmt.Errorf("hold a snapshot: %w", err)
			}
		}
	}
	began, worked := time.Now(), 0
	for round := range rounds {
		age := s.harness.HeldFor * time.Duration(round) / time.Duration(rounds)
		n, err := s.workUntil(ctx, began.Add(age))
		if err != nil {
			return err
		}
		worked += n
		n = 2 * s.harness.Entries
		if _, err := s.push(ctx, n, 1000, solo); err != nil {
			return err
		}
		times, err := s.claimTimes(ctx, usual, solo)
		if err != nil {
			return err
		}
		o, err := s.drain(ctx, NodeConfig{}, 1, n)
		if err != nil {
			return err
		}
		worked += o.Handled
		x := count(worked / 1000 * 1000)
		if s.harness.HeldFor > 0 {
			x = age.Round(time.Second).String()
		}
		add(Point{Series: series, X: x, Figures: o.costs().with(times)})
	}
	return nil
}

// workUntil pushes and works off 1,000 entries a second until a time, and says how many that were.
func (s *testbed) workUntil(ctx context.Context, end time.Time) (int, error) {
	if time.Until(end) < time.Second {
		return 0, nil
	}
	c, err := s.startNodes(ctx, NodeConfig{}, 1)
	if err != nil {
		return 0, err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n += 100 {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case now := <-tick.C:
			if now.After(end) {
				if err := c.await(ctx, n, s.harness.PointTime); err != nil {
					return 0, err
				}
				_, err := c.stop(ctx)
				return n, err
			}
		}
		if _, err := s.push(ctx, 100, 100, solo); err != nil {
			return 0, err
		}
	}
}

// limits drains queues under limits that never bind, and one without.
func (h *Harness) limits(ctx context.Context, add func(Point)) error {
	const many = 1_000_000
	for _, c := range []struct {
		name  string
		queue invalidation.Config
		limit map[string]any
	}{
		{name: "none"},
		{name: "max_concurrent", queue: invalidation.Config{MaxConcurrent: many}},
		{name: "max_concurrent_per_node", queue: invalidation.Config{MaxConcurrentPerNode: many}},
		{name: "shared units", limit: map[string]any{"max_units": many}},
		{name: "token bucket", limit: map[string]any{"rate": 1e7, "burst": 1e7}},
		{name: "capacity", queue: invalidation.Config{Capacity: 100 * many}},
	} {
		s, err := h.testbed(ctx, c.queue)
		if err != nil {
			return err
		}
		f, err := s.limited(ctx, c.limit)
		s.close()
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		add(Point{X: c.name, Figures: f})
	}
	return nil
}

func (s *testbed) limited(ctx context.Context, limit map[string]any) (Figures, error) {
	if limit != nil {
		if err := operator.New(s.pool).SetLimit(ctx, "bench", limit, invalidation.By{Reason: "bench"}); err != nil {
			return nil, err
		}
		if err := operator.New(s.pool).UseLimit(ctx, "bench", "bench", 1,
			invalidation.By{Reason: "bench"}); err != nil {
			return nil, err
		}
		var err error
		if s.queue, err = invalidation.Open(ctx, s.pool, "bench"); err != nil {
			return nil, err
		}
	}
	n := 3 * s.harness.Entries
	took, err := s.push(ctx, n, 1000, solo)
	if err != nil {
		return nil, err
	}
	times, err := s.claimTimes(ctx, usual, solo)
	if err != nil {
		return nil, err
	}
	o, err := s.drain(ctx, NodeConfig{}, 1, n)
	if err != nil {
		return nil, err
	}
	return o.costs().with(times, Figures{pushTitle: float64(n) / took.Seconds()}), nil
}
