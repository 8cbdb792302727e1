package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// site is a database with leaders on it. Each leader has a database role of its own, so that the database can tell
// who wrote what.
type site struct {
	t       *testing.T
	server  *pgtest.Own
	dsn     string
	pool    *pgxpool.Pool
	leaders []*leader
}

type leader struct {
	*program
	address, debug string
}

func newSite(t *testing.T, leaders int) *site {
	t.Helper()
	own := pgtest.Server(t)
	s := &site{t: t, server: own, dsn: own.DSN(), pool: own.Pool()}
	if _, err := invalidation.Create(t.Context(), s.pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	for _, duty := range []string{"leader", "node"} {
		s.exec(`CREATE ROLE duty_` + duty)
		s.exec(`SELECT penstock.grant_duty('` + duty + `', 'duty_` + duty + `')`)
	}
	s.exec(`CREATE TABLE public.written (at timestamptz DEFAULT clock_timestamp(), who text DEFAULT session_user,
	                                     relation text, verb text, entry_id bigint)`)
	s.exec(`CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
	        BEGIN INSERT INTO public.written (relation, verb, entry_id)
	              VALUES (TG_TABLE_NAME, TG_OP, (to_jsonb(coalesce(NEW, OLD))->>'entry_id')::bigint); RETURN NULL; END $$`)
	for _, relation := range []string{"ready", "entry_work", "lock", "node", "leader"} {
		s.exec(`CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON penstock.` + relation + ` FOR EACH ROW EXECUTE FUNCTION public.note()`)
	}
	for i := range leaders {
		s.leaders = append(s.leaders, s.startLeader(fmt.Sprintf("leader_%c", 'a'+i)))
	}
	return s
}

func (s *site) startLeader(role string, args ...string) *leader {
	s.t.Helper()
	s.login(role, "leader")
	u, err := url.Parse(s.dsn)
	if err != nil {
		s.t.Fatal(err)
	}
	u.User = url.User(role)
	args = append([]string{
		"--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0", "--open", "--database-url", u.String(),
	}, args...)
	l := &leader{program: start(s.t, "leader", role, args...)}
	started := l.says("leader started")
	l.address, l.debug = "http://"+value(started, "listen"), "http://"+value(started, "debug")
	return l
}

// login makes a database role with the rights of a duty and no more. It inherits them from a role that was granted them
// before any program ran: grants to each role would take a second, and deadlock with partitions that a leader creates.
func (s *site) login(role, duty string) {
	s.t.Helper()
	s.exec(`CREATE ROLE ` + role + ` LOGIN INHERIT IN ROLE duty_` + duty)
}

// answers waits until a database that was stopped answers, and leaves the connections that it cut.
func (s *site) answers() {
	s.t.Helper()
	eventually(s.t, time.Minute, "the database answers", func() bool { return s.pool.Ping(s.t.Context()) == nil })
	s.pool.Reset()
}

func (s *site) exec(sql string) {
	s.t.Helper()
	if _, err := s.pool.Exec(s.t.Context(), sql); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) query(sql string, args ...any) (value int64) {
	s.t.Helper()
	if err := s.pool.QueryRow(s.t.Context(), `SELECT n::bigint FROM (`+sql+`) q(n)`, args...).Scan(&value); err != nil {
		s.t.Fatal(err)
	}
	return value
}

// term returns the newest term and the role of its holder; "" if its lease has lapsed or nobody holds it.
func (s *site) term() (term int64, role string) {
	s.t.Helper()
	const sql = `
SELECT term, coalesce((SELECT who FROM public.written WHERE relation = 'leader' ORDER BY at DESC LIMIT 1), '')
  FROM penstock.leader WHERE renewed_at + lease > clock_timestamp()`
	err := s.pool.QueryRow(s.t.Context(), sql).Scan(&term, &role)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		s.t.Fatal(err)
	}
	return term, role
}

// elected waits for a term after the given one and returns it with its leader.
func (s *site) elected(after int64) (int64, *leader) {
	s.t.Helper()
	const within = time.Minute
	var term int64
	var found *leader
	eventually(s.t, within, fmt.Sprintf("a leader is elected after term %d", after), func() bool {
		t, role := s.term()
		for _, l := range s.leaders {
			if l.name == role && t > after {
				term, found = t, l
			}
		}
		return found != nil
	})
	return term, found
}

func (s *site) other(than *leader) *leader {
	for _, l := range s.leaders {
		if l != than {
			return l
		}
	}
	s.t.Fatal("there is no other leader")
	return nil
}

// request sends JSON and reads JSON.
func (l *leader) request(method, path string, body any) (answer map[string]any, err error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(l.t.Context(), method, l.address+path, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %w %d", method, path, errStatus, response.StatusCode)
	}
	_ = json.NewDecoder(response.Body).Decode(&answer) // /metrics is not JSON
	return answer, err
}

// pushDue pushes n entries through a leader that come due evenly spread over the time from now on.
func (s *site) pushDue(through *leader, n int, over time.Duration) {
	s.t.Helper()
	entries := make([]map[string]any, n)
	for i := range entries {
		due := time.Now().Add(500*time.Millisecond + over*time.Duration(i)/time.Duration(n))
		entries[i] = map[string]any{"payload": i, "due_at": due.Format(time.RFC3339Nano)}
	}
	if _, err := through.request("POST", "/v1/queues/work/entries", entries); err != nil {
		s.t.Fatalf("push: %v", err)
	}
}

// promotedOnce waits until n entries were promoted, and asserts that none of them was promoted twice.
func (s *site) promotedOnce(n int64, within time.Duration) {
	s.t.Helper()
	const ready = `FROM public.written WHERE relation = 'ready' AND verb = 'INSERT'`
	eventually(s.t, within, fmt.Sprintf("%d entries are promoted", n), func() bool {
		return s.query(`SELECT count(DISTINCT entry_id) `+ready) == n
	})
	if all := s.query(`SELECT count(*) ` + ready); all != n {
		s.t.Errorf("%d entries were promoted %d times", n, all)
	}
}

func TestKilledLeaderIsReplacedWithinSixSecondsAndNoDutyIsDoneTwice(t *testing.T) {
	s := newSite(t, 3)
	m := s.watchMachine()
	term, first := s.elected(0)
	s.pushDue(s.other(first), 400, 10*time.Second)
	s.exec(`CREATE TABLE public.killed AS SELECT clock_timestamp() AS at`)
	first.signal(syscall.SIGKILL)
	next, second := s.elected(term)
	if second == first {
		t.Fatalf("term %d is that of the dead leader", next)
	}
	s.within(m, "the take-over", 6*time.Second, `SELECT k.at, l.elected_at FROM penstock.leader l, public.killed k`)
	s.promotedOnce(400, time.Minute)
	s.within(m, "the latest promotion after its due time", 7*time.Second, `
SELECT e.due_at, w.at FROM public.written w JOIN penstock.entry e ON e.id = w.entry_id
 WHERE w.relation = 'ready' ORDER BY w.at - e.due_at DESC LIMIT 1`)
}

func TestStoppedLeaderWritesNothingOnceItsTermIsOver(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	term, frozen := s.elected(0)
	s.pushDue(s.other(frozen), 1000, 15*time.Second)
	eventually(t, time.Minute, "the first leader promotes", func() bool {
		return s.query(`SELECT count(*) FROM public.written WHERE who = $1 AND relation = 'ready'`, frozen.name) > 20
	})
	frozen.signal(syscall.SIGSTOP)
	next, heir := s.elected(term)
	s.exec(`CREATE TABLE public.over AS SELECT clock_timestamp() AS at`)
	before := s.query(`SELECT count(*) FROM public.written WHERE who = $1`, heir.name)
	frozen.signal(syscall.SIGCONT)
	frozen.says("term ended")
	s.promotedOnce(1000, time.Minute)
	if n := s.query(`SELECT count(*) FROM public.written w, public.over o WHERE w.who = $1 AND w.at > o.at`, frozen.name); n != 0 {
		t.Errorf("the old leader wrote %d times after term %d had begun", n, next)
	}
	if after := s.query(`SELECT count(*) FROM public.written WHERE who = $1`, heir.name); after == before {
		t.Error("the new leader wrote nothing: the test shows nothing")
	}
	if now, role := s.term(); now != next || role != heir.name {
		t.Errorf("term %d of %s, want %d of %s", now, role, next, heir.name)
	}
}

func TestTerminatedLeaderHandsOverWithinHalfASecondAndExitsZero(t *testing.T) {
	s := newSite(t, 3)
	m := s.watchMachine()
	for range 2 {
		term, l := s.elected(0)
		s.exec(`DROP TABLE IF EXISTS public.told`)
		s.exec(`CREATE TABLE public.told AS SELECT clock_timestamp() AS at`)
		l.signal(syscall.SIGTERM)
		if code := l.exit(); code != 0 {
			t.Errorf("exit status %d", code)
		}
		s.elected(term)
		told, elected, _ := s.moments("the hand-over", `SELECT o.at, l.elected_at FROM penstock.leader l, public.told o`)
		m.JudgeWork(t, "the hand-over", told, elected, 500*time.Millisecond) // the leader ends its duties meanwhile
	}
}

func TestLeadersOutliveADatabaseThatIsRestarted(t *testing.T) {
	s := newSite(t, 2)
	m := s.watchMachine()
	term, l := s.elected(0)
	s.server.Stop(devpostgres.Crash)
	if _, err := l.request("POST", "/v1/queues/work/entries", map[string]any{"payload": 1}); !errors.Is(err, errStatus) {
		t.Errorf("push without a database: %v, want status 503", err)
	}
	if answer, err := l.request("GET", "/readyz", nil); !errors.Is(err, errStatus) || answer["status"] != "not ready" {
		t.Errorf("readiness without a database: %v (%v)", answer, err)
	}
	if _, err := l.request("GET", "/livez", nil); err != nil {
		t.Errorf("a leader without a database is restarted for nothing: %v", err)
	}
	l.says("term ended")
	s.server.Start()
	began := time.Now()
	for _, l := range s.leaders {
		// Under a key: an answer that got lost is not a second entry.
		entry := map[string]any{"payload": 1, "idempotency_key": l.name}
		eventually(t, time.Minute, l.name+" accepts entries again", func() bool {
			_, err := l.request("POST", "/v1/queues/work/entries", entry)
			return err == nil
		})
	}
	m.Judge(t, "the way from the start of the database to an accepted entry", began, time.Now(), 5*time.Second)
	s.answers()
	if next, _ := s.elected(term); next <= term {
		t.Errorf("term %d after term %d", next, term)
	}
	s.pushDue(l, 10, 0)
	s.promotedOnce(12, time.Minute) // two of them were due at once
}

func TestEveryLeaderServesRequests(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	_, elected := s.elected(0)
	for _, l := range []*leader{elected, s.other(elected)} {
		pushed, err := l.request("POST", "/v1/queues/work/entries", map[string]any{"payload": l.name})
		if err != nil {
			t.Fatalf("push to %s: %v", l.name, err)
		}
		id, _ := pushed["id"].(float64)
		read, err := s.other(l).request("GET", fmt.Sprintf("/v1/entries/%.0f", id), nil)
		if err != nil || read["state"] != "pending" || read["queue"] != "work" {
			t.Errorf("read from the other leader: %v (%v)", read, err)
		}
		debug := &leader{program: l.program, address: l.debug}
		for path, at := range map[string]*leader{"/livez": l, "/readyz": l, "/metrics": debug, "/debug/pprof/heap": debug} {
			if _, err := at.request("GET", path, nil); err != nil {
				t.Errorf("%s of %s: %v", path, l.name, err)
			}
		}
		if _, err := l.request("GET", "/metrics", nil); err == nil {
			t.Error("metrics are shown to clients")
		}
	}
}

func TestLeaderRefusesWhatItIsToldWrongly(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, arg, want string }{
		{"flag", "--lisen=:1", "lisen"},
		{"value", "--election-lease=1ms", "leader.election.lease"},
		{"database address", "--database-url=postgres://localhost:port/x", "database address"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, "leader", "leader", c.arg, "--listen", "127.0.0.1:0")
			if code := p.exit(); code == 0 {
				t.Error("exit status 0")
			}
			if said := strings.Join(p.said(), "\n"); !strings.Contains(said, c.want) {
				t.Errorf("it says %q, want something about %q", said, c.want)
			}
		})
	}
}
