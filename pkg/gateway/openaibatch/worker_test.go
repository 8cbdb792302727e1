package openaibatch

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// shop is a database with batches of one client, behind a gateway that serves no request.
type shop struct {
	*testing.T
	*Batches
	pool *pgxpool.Pool
}

func newShop(t *testing.T, config Config) *shop {
	t.Helper()
	pool := pgtest.New(t)
	return &shop{T: t, Batches: New(config, gateway.New(gateway.Config{}), pool), pool: pool}
}

// file stores a complete file.
func (s *shop) file(text string) (id string) {
	s.Helper()
	id, err := createFile(s.Context(), s.pool, "shop", "in.jsonl", purposeBatch)
	if err == nil {
		err = appendFile(s.Context(), s.pool, id, []byte(text))
	}
	if err == nil {
		_, err = completeFile(s.Context(), s.pool, id, purposeBatch, "in.jsonl", time.Hour)
	}
	if err != nil {
		s.Fatal(err)
	}
	return id
}

// create makes a batch of a file.
func (s *shop) create(file string) batchRow {
	s.Helper()
	b, err := createBatch(s.Context(), s.pool, order{
		Owner: "shop", Flow: "shop", Input: file, Endpoint: "/v1/chat/completions", Window: "1h", Lasts: time.Hour,
	})
	if err != nil {
		s.Fatal(err)
	}
	return b
}

func (s *shop) exec(sql string, args ...any) {
	s.Helper()
	if _, err := s.pool.Exec(s.Context(), sql, args...); err != nil {
		s.Fatal(err)
	}
}

func (s *shop) again(b batchRow) batchRow {
	s.Helper()
	rows, err := s.pool.Query(s.Context(), batchSQL, b.ID, b.Owner)
	if err == nil {
		b, err = oneBatch(rows)
	}
	if err != nil {
		s.Fatal(err)
	}
	return b
}

func TestOnlyABatchThatHasNotEndedIsCancelled(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	b := s.create(s.file("nonsense"))
	for state, want := range map[status]status{
		validating: cancelling, inProgress: cancelling, cancelling: cancelling, finalizing: finalizing,
		completed: completed, failed: failed, expired: expired, cancelled: cancelled,
	} {
		s.exec(`UPDATE penstock.gateway_batch SET status = $2 WHERE id = $1`, b.ID, state)
		_, err := oneBatch(postgres.Query(t.Context(), s.pool, cancelSQL, b.ID, b.Owner))
		if got := s.again(b).Status; got != want || (err != nil) != (want == state) {
			t.Errorf("a batch that was %s is %s (%v), want %s", state, got, err, want)
		}
	}
}

// A batch whose turn takes too long comes behind the others, and gets another turn.
func TestTurnThatTakesTooLongStopsNoOtherBatch(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{turnMax: 10 * time.Second}) // far above a turn that does not wait
	slow := s.create(s.file("nonsense"))
	other := s.create(s.file("nonsense"))
	lock, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Exec(t.Context(), `SELECT FROM penstock.gateway_file WHERE id = $1 FOR UPDATE`, slow.Output); err != nil {
		t.Fatal(err)
	}
	for range 2 { // one for each: the slow one may be due again when the other one has ended
		s.turn(t.Context())
	}
	if got := s.again(other); got.Status != failed {
		t.Errorf("the other batch is %s", got.Status)
	}
	if got := s.again(slow); got.Status != validating || got.FailedTurns != 1 {
		t.Errorf("the slow batch is %s after %d failed turns", got.Status, got.FailedTurns)
	}
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp() WHERE id = $1`, slow.ID)
	if !s.turn(t.Context()) || s.again(slow).Status != failed {
		t.Errorf("the slow batch is %s", s.again(slow).Status)
	}
}

// held makes a turn at the batch wait. Its result is sent when release
// was called, or ctx has ended.
func (s *shop) held(ctx context.Context, b batchRow) (turned <-chan bool, release func()) {
	s.Helper()
	lock, err := s.pool.Begin(s.Context())
	if err == nil {
		_, err = lock.Exec(s.Context(), `SELECT FROM penstock.gateway_file WHERE id = $1 FOR UPDATE`, b.Output)
	}
	if err != nil {
		s.Fatal(err)
	}
	result := make(chan bool, 1)
	go func() { result <- s.turn(ctx) }()
	// It is counted before it knows that, and before it waits.
	const waitingSQL = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`
	for deadline, waits := time.Now().Add(10*time.Second), false; !waits; time.Sleep(10 * time.Millisecond) {
		if err := s.pool.QueryRow(s.Context(), waitingSQL).Scan(&waits); err != nil || time.Now().After(deadline) {
			s.Errorf("no turn waits: %v", err)
			break
		}
	}
	if s.again(b).FailedTurns == 0 {
		s.Error("the turn that runs is not counted")
	}
	return result, func() {
		if err := lock.Rollback(context.WithoutCancel(s.Context())); err != nil {
			s.Error(err)
		}
	}
}

// A turn that ends its process leaves the batch as it is while the turn runs: counted as failed, and not due.
func TestTurnIsCountedBeforeItBegins(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	b := s.create(s.file("nonsense"))
	turned, release := s.held(t.Context(), b)
	var later bool
	err := s.pool.QueryRow(t.Context(), `SELECT next_at > created_at + interval '4 s' FROM penstock.gateway_batch`).Scan(&later)
	if err != nil || !later {
		t.Errorf("the batch is due for another turn while one runs: %v", err)
	}
	release()
	if !<-turned {
		t.Error("the turn failed")
	}
	if got := s.again(b); got.Status != failed || got.FailedTurns != 0 {
		t.Errorf("the batch is %s after %d failed turns, want failed for its file, after 0", got.Status, got.FailedTurns)
	}
}

// After the clock was set back a batch had its next turn when the clock had caught up.
func TestABatchHasTurnsAfterTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.create(s.file("nonsense"))
	s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp() + interval '5 min'`)
	if s.turn(t.Context()) {
		t.Error("a batch has a turn in the pause after a failed one")
	}
	s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp() + interval '1 hour'`)
	if !s.turn(t.Context()) {
		t.Error("no batch has a turn")
	}
}

// A turn that ends with the program is no failure of its batch, which is due at once.
func TestTurnThatIsShutDownIsNoFailure(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	b := s.create(s.file("nonsense"))
	ctx, cancel := context.WithCancel(t.Context())
	turned, release := s.held(ctx, b)
	cancel()
	if <-turned || s.again(b).FailedTurns != 0 {
		t.Error("a turn was taken, or counted")
	}
	release()
	if !s.turn(t.Context()) || s.again(b).Status != failed {
		t.Errorf("the batch is not due, but %s", s.again(b).Status)
	}
}

// A batch that is not validated ends: at the end of its window, or after so many failed turns.
func TestBatchThatIsNotValidatedEnds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		change string
		want   status
	}{
		{`UPDATE penstock.gateway_batch SET expires_at = clock_timestamp()`, expired},
		{`UPDATE penstock.gateway_batch SET failed_turns = ` + strconv.Itoa(failedTurnsMax), failed},
	} {
		s := newShop(t, Config{})
		b := s.create(s.file("nonsense"))
		s.exec(c.change)
		for s.turn(t.Context()) {
		}
		b = s.again(b)
		if b.Status != c.want || b.OutputThere || b.ErrorsThere || (c.want == failed) != (len(b.Flaws) > 0) {
			t.Errorf("got %s with %s, want %s", b.Status, b.Flaws, c.want)
		}
	}
}

// step1 takes one turn at a batch, whenever it is due.
func (s *shop) step1(b batchRow) {
	s.Helper()
	s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp() WHERE id = $1`, b.ID)
	if !s.turn(s.Context()) {
		s.Fatal("no turn was taken")
	}
}
