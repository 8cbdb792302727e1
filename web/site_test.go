package web

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// site is a dashboard on a database of its own, with a token for each role.
type site struct {
	*testing.T
	pool    *pgxpool.Pool
	change  *operator.Database
	web     *Dashboard
	server  *httptest.Server
	secrets map[role]string
}

// newSite serves a dashboard on an empty database.
func newSite(t *testing.T) *site {
	t.Helper()
	dsn := pgtest.DSN(t)
	s := &site{T: t, pool: openPool(t, postgres.Config{DSN: dsn, MaxConns: 8}), secrets: map[role]string{}}
	read := openPool(t, postgres.Config{DSN: dsn, MaxConns: 4, StatementTimeout: time.Minute, ReadOnly: true})
	s.change = operator.New(s.pool)
	var err error
	cfg := Config{Token: living(s.change), Timetable: hourly, readTimeout: time.Minute}
	if s.web, err = New(operator.New(read), s.change, cfg); err != nil {
		t.Fatal(err)
	}
	for role, scope := range map[role]string{viewer: "read", operatorRole: "operate", administrator: "admin"} {
		s.secrets[role], err = s.change.CreateToken(t.Context(), operator.Grant{Name: role.String(), Scopes: []string{scope}}, tester)
		if err != nil {
			t.Fatal(err)
		}
	}
	s.server = httptest.NewServer(s.web)
	t.Cleanup(s.server.Close)
	t.Cleanup(s.web.Drain)
	return s
}

// living finds tokens that are valid, as the API does.
func living(db *operator.Database) func(context.Context, string) (operator.APIToken, error) {
	return func(ctx context.Context, secret string) (operator.APIToken, error) {
		t, err := db.FindToken(ctx, secret)
		if err == nil && !t.Live {
			err = invalidation.ErrNotFound
		}
		return t, err
	}
}

var tester = invalidation.By{Actor: "tester", Reason: "fixture"}

func openPool(t *testing.T, cfg postgres.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// as returns a browser of a visitor who has logged in.
func (s *site) as(r role) *browser {
	s.Helper()
	jar, _ := cookiejar.New(nil)
	b := &browser{site: s, client: &http.Client{Jar: jar}}
	if r == nobody {
		return b
	}
	if got := b.post("login", url.Values{"token": {s.secrets[r]}}); got.status != http.StatusOK {
		s.Fatalf("log in as %s: %d: %s", r, got.status, got.text)
	}
	return b
}

// browser keeps the cookies of one visitor, and runs no script.
type browser struct {
	*site
	client *http.Client
}

type answer struct {
	status int
	text   string
	header http.Header
	path   string // after redirects
}

func (b *browser) get(path string, headers ...string) answer {
	b.Helper()
	return b.do(http.MethodGet, path, nil, headers...)
}

func (b *browser) post(path string, form url.Values, headers ...string) answer {
	b.Helper()
	return b.do(http.MethodPost, path, form, headers...)
}

func (b *browser) do(method, path string, form url.Values, headers ...string) answer {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, b.server.URL+"/ui/"+path, strings.NewReader(form.Encode()))
	if err != nil {
		b.Fatal(err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w, err := b.client.Do(r)
	if err != nil {
		b.Fatal(err)
	}
	defer w.Body.Close()
	text, err := io.ReadAll(w.Body)
	if err != nil {
		b.Fatal(err)
	}
	return answer{w.StatusCode, string(text), w.Header, w.Request.URL.Path}
}

// exec runs a statement of a fixture.
func (s *site) exec(sql string, args ...any) {
	s.Helper()
	if _, err := s.pool.Exec(s.Context(), sql, args...); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
}

// fill makes a platform at work: queues in several states, a node with locks, failures, samples, a
// pause, an operation.
func (s *site) fill() {
	s.Helper()
	ctx := s.Context()
	q, err := invalidation.Create(ctx, s.pool, "work", invalidation.Config{})
	if err != nil {
		s.Fatal(err)
	}
	if _, err := invalidation.Create(ctx, s.pool, "idle", invalidation.Config{}); err != nil {
		s.Fatal(err)
	}
	pushes := make([]invalidation.Push, 60)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(fmt.Sprintf(`{"n": %d, "big": 9007199254740993, "password": "hush"}`, i))
		pushes[i].Flow = []string{"red", "blue", ""}[i%3]
		pushes[i].Name = "thumbnail"
		if i%5 == 0 {
			pushes[i].LockKey = fmt.Sprintf("user-%d", i%10)
		}
		if i%7 == 0 {
			pushes[i].DueAt = time.Now().Add(time.Hour)
		}
	}
	if _, err := q.Push(ctx, pushes...); err != nil {
		s.Fatal(err)
	}
	node := invalidation.Node{ID: 7001, Name: "node-1", Application: "default", Lease: time.Hour, Queues: []int32{q.ID}}
	if err := invalidation.Register(ctx, s.pool, node); err != nil {
		s.Fatal(err)
	}
	s.exec(`CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	s.exec(`INSERT INTO penstock.sample (queue_id, at, initial, pending, disabled, computing, failed, estimated, serving, head_age,
	                accepted, gone, dead_tuples, in_per_second, out_per_second)
	        SELECT $1, clock_timestamp() - n * interval '5 s', 9, 51 + n % 7, 0, 4, 3, false, 1, 12.5, 1000, 900, 17, 2.5 + n % 3, 2
	          FROM generate_series(0, 170) n`, q.ID)
	s.exec(`INSERT INTO penstock.failure (entry_id, created_at, queue_id, priority, attempt, crashes, flow, class, error, fingerprint,
	                payload, failed_at)
	        SELECT 100000 + n, clock_timestamp() - interval '1 h', $1, 1, 3, 0, 'red', 'permanent',
	               'worker answered 422: image ' || n || ' is not a picture', 'worker answered #: image # is not a picture',
	               '{"n": 1}', clock_timestamp() - n * interval '10 s'
	          FROM generate_series(1, 20) n`, q.ID)
	if _, err := s.change.Do(ctx, operator.PauseQueue, "idle", invalidation.By{Actor: "ann", Reason: "a migration"}, time.Time{}); err != nil {
		s.Fatal(err)
	}
}
