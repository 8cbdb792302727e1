package openaibatch

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// shop is a database with batches of one client, and no gateway in front of it.
type shop struct {
	*testing.T
	*Batches
	pool *pgxpool.Pool
}

func newShop(t *testing.T, config Config) *shop {
	t.Helper()
	pool := pgtest.New(t)
	return &shop{T: t, Batches: New(config, nil, pool), pool: pool}
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

// A batch whose turn takes too long comes behind the others, and gets another turn.
func TestTurnThatTakesTooLongStopsNoOtherBatch(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{TurnMax: 10 * time.Second}) // far above a turn that does not wait
	slow := s.create(s.file("nonsense"))
	other := s.create(s.file("nonsense"))
	lock, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Exec(t.Context(), `SELECT FROM penstock.gateway_file WHERE id = $1 FOR UPDATE`, slow.Output); err != nil {
		t.Fatal(err)
	}
	for s.turn(t.Context()) { // until none is due
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

// A turn that ends with the program is no failure of its batch.
func TestTurnThatIsShutDownIsNoFailure(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	b := s.create(s.file("nonsense"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s.turn(ctx) || s.again(b).FailedTurns != 0 {
		t.Error("a turn was taken, or counted")
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
		{`UPDATE penstock.gateway_batch SET failed_turns = ` + strconv.Itoa(failedTurnsMost), failed},
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
