package main

import (
	"cmp"
	"context"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/gateway"
)

// wireCut is a TCP proxy in front of the database that can be cut.
type wireCut struct {
	listener net.Listener
	network  string
	target   string
	cut      atomic.Bool
	mu       sync.Mutex
	conns    map[net.Conn]bool
}

func (s *site) cuttable() (*wireCut, string) {
	s.Helper()
	u, err := url.Parse(s.dsn)
	if err != nil {
		s.Fatal(err)
	}
	cfg, err := pgconn.ParseConfig(s.dsn)
	if err != nil {
		s.Fatal(err)
	}
	w := &wireCut{conns: map[net.Conn]bool{}}
	w.network, w.target = pgconn.NetworkAddress(cfg.Host, cfg.Port)
	if w.listener, err = (&net.ListenConfig{}).Listen(s.Context(), "tcp", "127.0.0.1:0"); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { w.listener.Close() })
	go w.run()
	u.Host = w.listener.Addr().String()
	options := u.Query()
	options.Del("host") // of a server on a socket: it would go before the address
	options.Del("port")
	options.Set("sslmode", "disable")
	u.RawQuery = options.Encode()
	return w, u.String()
}

func (w *wireCut) run() {
	for {
		client, err := w.listener.Accept()
		if err != nil {
			return
		}
		if w.cut.Load() {
			client.Close()
			continue
		}
		server, err := (&net.Dialer{}).DialContext(context.Background(), w.network, w.target)
		if err != nil {
			client.Close()
			continue
		}
		w.mu.Lock()
		if w.cut.Load() { // since the check above
			client.Close()
			server.Close()
		}
		w.conns[client], w.conns[server] = true, true
		w.mu.Unlock()
		go pipe(client, server)
		go pipe(server, client)
	}
}

func pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	to.Close()
	from.Close()
}

// away cuts the wire, or mends it.
func (w *wireCut) away(cut bool) {
	w.cut.Store(cut)
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.conns {
		if cut {
			c.Close()
		}
		delete(w.conns, c)
	}
}

// outage is how long the database is away, longer than the lease: PENSTOCK_OUTAGE=30s is a longer form.
func outage(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(cmp.Or(os.Getenv("PENSTOCK_OUTAGE"), "8s"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Online traffic goes on while the database is away, beyond the lease, and its use is counted to the call.
func TestOnlineTrafficOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	wire, dsn := s.cuttable()
	direct := s.dsn
	s.dsn = dsn
	f := s.startGateway(func(c *Config) { c.Gateway.Lease = outage(t) - time.Second })
	s.dsn = direct
	var served, failed atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for range 3 {
		clients.Go(func() {
			for ctx.Err() == nil {
				if _, _, err := f.ask(context.WithoutCancel(ctx), quick, "X-Penstock-Flow", "t"); err != nil {
					t.Log(err)
					failed.Add(1)
				} else {
					served.Add(1)
				}
			}
		})
	}
	s.eventually("requests are served", func() bool { return served.Load() > 10 })
	wire.away(true)
	time.Sleep(outage(t))
	before := served.Load()
	s.eventually("requests are served after the lease is over", func() bool { return served.Load() > before+10 })
	s.eventually("the gateway says that it is degraded", func() bool { return f.leases.Figures().Degraded })
	wire.away(false)
	s.eventually("the database is back", func() bool { return !f.leases.Figures().Degraded })
	stop()
	clients.Wait()
	if failed.Load() != 0 {
		t.Errorf("%d requests failed", failed.Load())
	}
	if _, most, _ := s.gpu.counts(); most > 4 {
		t.Errorf("%d calls at once on 4 slots", most)
	}
	t.Logf("%d requests were served", served.Load())
	s.eventually("each call is counted", func() bool {
		return s.count(`SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour WHERE flow = 't'`) == int(served.Load())
	})
}

// cutOnce cuts the connections at the first batch of statements, which is the first reading of the settings.
type cutOnce struct {
	cut  func()
	once sync.Once
}

func (c *cutOnce) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (c *cutOnce) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *cutOnce) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.once.Do(c.cut)
	return ctx
}

func (c *cutOnce) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (c *cutOnce) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// A connection that is lost while the gateway starts costs a wait, not the process.
func TestAGatewayWhoseDatabaseGoesAwayWhileItStartsWaits(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	wire, dsn := s.cuttable()
	cuts := 0
	s.dsn = dsn
	cfg := s.connect().Config()
	cfg.ConnConfig.Tracer = &cutOnce{cut: func() {
		cuts++
		wire.away(true)
		wire.away(false)
	}}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	x := &server{cfg: defaults(), log: s.log(), observer: newObserver(), pool: pool}
	if err := x.assemble(nil); err != nil {
		t.Fatal(err)
	}
	if err := x.enter(t.Context()); err != nil || cuts != 1 {
		t.Fatalf("the gateway ended after %d cuts: %v", cuts, err)
	}
	if states := x.gateway.States(); len(states) != 1 || states[0].Model != "m" {
		t.Errorf("got %+v, want the model that is registered", states)
	}
}

func TestSnapshotTakesAGatewayThroughAStart(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	path := filepath.Join(t.TempDir(), "snapshot")
	if err := f.settings.snapshot().Write(path); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	cfg.Database.URL, cfg.Gateway.Snapshot = "postgres://127.0.0.1:1/none?connect_timeout=1", path
	s.dsn = cfg.Database.URL
	x := &server{cfg: cfg, log: s.log(), observer: newObserver(), pool: s.connect()}
	listen, err := cfg.Database.Connect(0).ListenConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := x.assemble(listen); err != nil {
		t.Fatal(err)
	}
	if !x.settings.restore() {
		t.Fatal("the snapshot was not taken")
	}
	if states := x.gateway.States(); len(states) != 1 || states[0].Model != "m" || len(states[0].Instances) != 1 {
		t.Errorf("got %+v", states)
	}
	old := f.settings.snapshot()
	old.At = time.Now().Add(-gateway.StateKept - time.Minute)
	if err := old.Write(path); err != nil {
		t.Fatal(err)
	}
	if x.settings.restore() {
		t.Error("a snapshot was taken that is too old")
	}
}
