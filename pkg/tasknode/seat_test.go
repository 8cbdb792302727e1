package tasknode_test

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// seating is a node with an ear for hints and a queue whose pushes hint; deaf drops the hints of hand-overs.
type seating struct {
	*testing.T
	pool *pgxpool.Pool
	q    *invalidation.Queue
	node *tasknode.Node
	stop func()
}

func newSeating(t *testing.T, c tasknode.Config, deaf bool, h invalidation.HandlerFunc) *seating {
	t.Helper()
	s := &seating{T: t, pool: open(t)}
	s.q = create(t, s.pool, "work", invalidation.Config{})
	s.node, s.stop = start(t, s.pool, c, map[string]invalidation.HandlerFunc{"work": h})
	ctx, cancel := context.WithCancel(context.Background())
	hinter := invalidation.NewHinter(s.pool, 0)
	cfg := invalidation.ListenConfig{Conn: s.pool.Config().ConnConfig.Copy(), Wake: s.node.Wake, HandedOver: s.node.HandedOver}
	if deaf {
		cfg.HandedOver = nil
	}
	listener := invalidation.NewListener(cfg)
	var duties sync.WaitGroup
	duties.Go(func() { _ = hinter.Run(ctx) })
	duties.Go(func() { _ = listener.Run(ctx) })
	t.Cleanup(func() { s.stop(); cancel(); duties.Wait() })
	s.q = s.q.Hinting(hinter)
	for !listener.Status().Connected {
		time.Sleep(time.Millisecond)
	}
	return s
}

func (s *seating) push() {
	s.Helper()
	push(s.T, s.q, payload(invalidation.Push{}))
}

const seatsSQL = `SELECT count(*) = $1 FROM penstock.seat`

// warm pushes one entry, whose hint lets the node offer seats.
func (s *seating) warm(seats int) {
	s.Helper()
	s.push()
	eventually(s.T, s.pool, "the first entry ends", emptySQL)
	eventually(s.T, s.pool, "seats are offered", seatsSQL, seats)
}

func counted(runs *atomic.Int64) invalidation.HandlerFunc {
	return func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		runs.Add(1)
		return nil, nil
	}
}

func TestAnIdleNodeIsHandedWhatIsPushed(t *testing.T) {
	var runs atomic.Int64
	s := newSeating(t, tasknode.Config{Threads: 8}, false, counted(&runs))
	s.warm(2)
	for range 5 {
		s.push()
		eventually(t, s.pool, "it ends", emptySQL)
		eventually(t, s.pool, "seats are offered again", seatsSQL, 2)
	}
	if n := s.node.Stats().HandedOver.Load(); n != 5 || runs.Load() != 6 {
		t.Errorf("%d entries were handed over in %d runs, want 5 in 6", n, runs.Load())
	}
	if held := s.node.Held(); held != 0 {
		t.Errorf("an idle node says that it holds %d locks", held)
	}
	s.stop()
	eventually(t, s.pool, "a drain leaves neither seat nor node", `SELECT NOT EXISTS (SELECT FROM penstock.seat) AND NOT EXISTS (SELECT FROM penstock.node)`)
}

func TestWhatIsHandedOverWithoutAHintIsFound(t *testing.T) {
	var runs atomic.Int64
	s := newSeating(t, tasknode.Config{Threads: 8, Poll: time.Hour}, true, counted(&runs))
	s.warm(2)
	s.push()
	eventually(t, s.pool, "it ends though no hint came", emptySQL)
	if n := s.node.Stats().HandedOver.Load(); n != 1 || runs.Load() != 2 {
		t.Errorf("%d entries were handed over in %d runs, want 1 in 2", n, runs.Load())
	}
	eventually(t, s.pool, "no more seats are offered where hints get lost", seatsSQL, 0)
}

// Hints may come twice, late, and while the node asks the database.
func TestWhatIsHandedOverRunsOnceHoweverOftenItIsHintedAt(t *testing.T) {
	seen := sync.Map{}
	var twice atomic.Int64
	s := newSeating(t, tasknode.Config{Threads: 16}, false, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if _, again := seen.LoadOrStore(r.Entry.ID, true); again {
			twice.Add(1)
		}
		return nil, nil
	})
	s.warm(4)
	ctx, cancel := context.WithCancel(t.Context())
	var liars sync.WaitGroup
	for range 2 {
		liars.Go(func() {
			for entry := invalidation.EntryID(1); ctx.Err() == nil; entry = entry%300 + 1 {
				for claim := range int32(300) {
					s.node.HandedOver(invalidation.HandOver{Queue: s.q.ID, Node: s.node.ID(), Claim: claim, Entry: entry})
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for range 200 {
		s.push()
	}
	eventually(t, s.pool, "all end", emptySQL)
	cancel()
	liars.Wait()
	if twice.Load() != 0 {
		t.Errorf("%d entries ran twice", twice.Load())
	}
	if s.node.Stats().HandedOver.Load() == 0 {
		t.Error("nothing was handed over: this test tests nothing")
	}
}

// Seats never keep a thread from what is in line.
func TestSeatsMakeWayForWhatIsInLine(t *testing.T) {
	release := make(chan struct{})
	var running atomic.Int64
	s := newSeating(t, tasknode.Config{Threads: 4}, false, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if string(r.Entry.Payload) == `{"long": true}` {
			running.Add(1)
			<-release
		}
		return nil, nil
	})
	s.warm(1)
	long := invalidation.Push{Payload: json.RawMessage(`{"long": true}`)}
	push(t, s.q, long, long, long, long)
	for deadline := time.Now().Add(10 * time.Second); running.Load() < 4; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d runs beside a seat, want one for each of 4 threads", running.Load())
		}
	}
	eventually(t, s.pool, "no seat is left", seatsSQL, 0)
	close(release)
	eventually(t, s.pool, "all end", emptySQL)
}

// A crash of the database empties the table of seats: their permits come back, and others are offered.
func TestSeatsThatTheDatabaseLostAreOfferedAnew(t *testing.T) {
	s := newSeating(t, tasknode.Config{Threads: 4}, false, counted(new(atomic.Int64)))
	s.warm(1)
	if _, err := s.pool.Exec(t.Context(), `TRUNCATE penstock.seat`); err != nil {
		t.Fatal(err)
	}
	s.push() // and hints
	eventually(t, s.pool, "another seat is offered", seatsSQL, 1)
}

// What gates bound is not for seats alone: they make way for what is refused beside them.
func TestSeatsMakeWayForWhatAGateRefuses(t *testing.T) {
	g := &narrow{left: 1}
	s := newSeating(t, tasknode.Config{Threads: 8, Gates: []tasknode.Gate{g}}, false, counted(new(atomic.Int64)))
	s.warm(1)
	push(t, s.q, invalidation.Push{Payload: json.RawMessage(`{}`), Name: "takes no seat"})
	eventually(t, s.pool, "it runs", emptySQL)
}

// narrow lets left entries run at once.
type narrow struct {
	mu   sync.Mutex
	left int
}

func (g *narrow) Take(_ string, _, want int) (int, func(int)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(want, g.left)
	g.left -= n
	return n, func(n int) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.left += n
	}
}
