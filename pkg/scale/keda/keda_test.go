package keda

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/scale/keda/externalscaler"
)

// switched is a database that can be away.
type switched struct {
	postgres.DB
	away chan struct{} // closed: it is
}

func (s switched) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	select {
	case <-s.away:
		return nil, errors.New("connection refused")
	default:
		return s.DB.Query(ctx, sql, args...)
	}
}

// The HorizontalPodAutoscaler that KEDA makes of the example in the docs follows each number. Its rule (replica_calculator.go
// of Kubernetes): nothing changes while the metric, divided by target and pods, is within the tolerance of 1.
func TestTheExampleFollowsEachNumber(t *testing.T) {
	page, err := os.ReadFile("../../../docs/autoscaling.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, found := strings.Cut(string(page), "```yaml\napiVersion: keda.sh/v1alpha1\n")
	example, _, ends := strings.Cut(example, "```")
	type rules struct {
		Tolerance *float64 `yaml:"tolerance"`
		Window    int      `yaml:"stabilizationWindowSeconds"`
	}
	var object struct {
		Spec struct {
			Advanced struct {
				Config struct {
					Behavior struct {
						Up   rules `yaml:"scaleUp"`
						Down rules `yaml:"scaleDown"`
					} `yaml:"behavior"`
				} `yaml:"horizontalPodAutoscalerConfig"`
			} `yaml:"advanced"`
		} `yaml:"spec"`
	}
	if err := yaml.Unmarshal([]byte(example), &object); !found || !ends || err != nil {
		t.Fatalf("the page has no example that can be read: %v", err)
	}
	behavior := object.Spec.Advanced.Config.Behavior
	tolerance := func(r rules) float64 {
		if r.Tolerance == nil {
			return 0.1
		}
		return *r.Tolerance
	}
	for _, c := range [][2]float64{{20, 18}, {20, 21}, {1000, 999}, {1000, 1001}} {
		pods, decided := c[0], c[1]
		ratio := decided / pods
		if ratio >= 1-tolerance(behavior.Down) && ratio <= 1+tolerance(behavior.Up) {
			t.Errorf("%v pods stay where %v are decided", pods, decided)
		}
	}
}

// serve returns a client of KEDA's contract, over a real connection of gRPC.
func serve(t *testing.T, cfg Config) externalscaler.ExternalScalerClient {
	t.Helper()
	cfg.timeout = time.Minute // of a statement, which a busy machine may delay
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	New(cfg).Register(server)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///keda", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return externalscaler.NewExternalScalerClient(conn)
}

func exec(t *testing.T, db *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// decide stores a decision as the leader does.
func decide(t *testing.T, db *pgxpool.Pool, desired int, age time.Duration) {
	t.Helper()
	exec(t, db, `INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	             VALUES ('llama', '{}', 0, $1, 0, 0, 0, 0, 0, '', clock_timestamp() - $2::interval)
	             ON CONFLICT (model) DO UPDATE SET desired = excluded.desired, decided_at = excluded.decided_at`, desired, age)
	exec(t, db, `INSERT INTO penstock.deployment_state (name, desired, decided_at) VALUES ('llama', $1, now())
	             ON CONFLICT (name) DO UPDATE SET desired = excluded.desired, decided_at = excluded.decided_at`, desired)
}

func deployed(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.New(t)
	exec(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	exec(t, db, `SELECT penstock.set_deployment('llama', 'llama', '{"backend": "keda"}')`)
	return db
}

func ref(deployment string) *externalscaler.ScaledObjectRef {
	return &externalscaler.ScaledObjectRef{
		Name: "llama", Namespace: "default", ScalerMetadata: map[string]string{"deployment": deployment},
	}
}

func TestKEDAGetsWhatWasDecided(t *testing.T) {
	db := deployed(t)
	client := serve(t, Config{DB: db})
	spec, err := client.GetMetricSpec(t.Context(), ref("llama"))
	if err != nil || len(spec.GetMetricSpecs()) != 1 || spec.GetMetricSpecs()[0].GetTargetSize() != 1 {
		t.Fatalf("the specification is %v, %v", spec, err)
	}
	name := spec.GetMetricSpecs()[0].GetMetricName()
	for _, desired := range []int{3, 0, 7} {
		decide(t, db, desired, 0)
		got, err := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{
			ScaledObjectRef: ref("llama"), MetricName: name,
		})
		if err != nil {
			t.Fatal(err)
		}
		v := got.GetMetricValues()
		if len(v) != 1 || v[0].GetMetricName() != name || v[0].GetMetricValue() != int64(desired) {
			t.Errorf("%d decided, %v given", desired, v)
		}
		active, err := client.IsActive(t.Context(), ref("llama"))
		if err != nil || active.GetResult() != (desired > 0) {
			t.Errorf("%d decided, active %v, %v", desired, active, err)
		}
	}
}

func TestWhatIsNotKnownIsNoZero(t *testing.T) {
	db := deployed(t)
	away := make(chan struct{})
	client := serve(t, Config{DB: switched{db, away}, knownFor: 2 * time.Second})
	metric := func(deployment string) (int64, codes.Code) {
		got, err := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref(deployment)})
		_, activeErr := client.IsActive(t.Context(), ref(deployment))
		if status.Code(err) != status.Code(activeErr) {
			t.Errorf("GetMetrics answers %v, IsActive %v", err, activeErr)
		}
		if err != nil {
			return 0, status.Code(err)
		}
		return got.GetMetricValues()[0].GetMetricValue(), codes.OK
	}
	expect := func(when, deployment string, value int64, code codes.Code) {
		t.Helper()
		if n, got := metric(deployment); n != value || got != code {
			t.Errorf("%s: %d, %v, want %d, %v", when, n, got, value, code)
		}
	}
	expect("nothing is decided", "llama", 0, codes.Unavailable)
	expect("no deployment is named", "", 0, codes.InvalidArgument)
	expect("an unknown deployment", "nobody", 0, codes.NotFound)
	exec(t, db, `SELECT penstock.set_deployment('other', 'llama', '{"backend": "advise"}')`)
	expect("a deployment of another backend", "other", 0, codes.FailedPrecondition)
	decide(t, db, 4, time.Minute)
	expect("no leader decides any more", "llama", 0, codes.Unavailable)
	for _, mode := range []string{"advise", "disabled"} {
		decide(t, db, 4, 0)
		exec(t, db, `SELECT penstock.set_deployment('llama', 'llama', jsonb_build_object('mode', $1::text))`, mode)
		expect("mode "+mode, "llama", 0, codes.Unavailable)
	}
	exec(t, db, `SELECT penstock.set_deployment('llama', 'llama', '{"mode": "full"}')`)
	exec(t, db, `SELECT penstock.set_scale_setting('scale.off', 'true', 'test')`)
	expect("scaling is off", "llama", 0, codes.Unavailable)
	exec(t, db, `SELECT penstock.set_scale_setting('scale.off', NULL, 'test')`)
	decide(t, db, 4, -time.Hour) // of a clock that is ahead: it does not get too old in this test
	expect("decided", "llama", 4, codes.OK)
	close(away)
	expect("the database is away", "llama", 4, codes.OK)
	expect("the database is away, and nothing was read before", "nobody", 0, codes.Unavailable)
}

// A server that is stopped, and not only a connection that fails: the last number is given out, one that was never read is
// not known, and when the server answers again the next number is that of the next decision.
func TestNumbersOutliveARestartOfTheDatabase(t *testing.T) {
	own := pgtest.Server(t)
	db := own.Pool()
	exec(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	for _, name := range []string{"llama", "unread"} {
		exec(t, db, `SELECT penstock.set_deployment($1, 'llama', '{"backend": "keda"}')`, name)
	}
	client := serve(t, Config{DB: db})
	metric := func(deployment string) (int64, codes.Code) {
		got, err := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref(deployment)})
		if err != nil {
			return 0, status.Code(err)
		}
		return got.GetMetricValues()[0].GetMetricValue(), codes.OK
	}
	expect := func(when, deployment string, value int64, code codes.Code) {
		t.Helper()
		if n, got := metric(deployment); n != value || got != code {
			t.Errorf("%s: %d, %v, want %d, %v", when, n, got, value, code)
		}
	}
	decide(t, db, 4, -time.Hour) // of a clock that is ahead: it does not get too old in this test
	expect("decided", "llama", 4, codes.OK)
	own.Stop(devpostgres.Fast)
	expect("the server is stopped", "llama", 4, codes.OK)
	expect("the server is stopped, and nothing was read before", "unread", 0, codes.Unavailable)
	own.Start()
	db.Reset() // connections that the stop has cut
	for db.Ping(t.Context()) != nil {
		time.Sleep(10 * time.Millisecond)
	}
	decide(t, db, 6, -time.Hour)
	expect("the server is back", "llama", 6, codes.OK)
}

func TestTheLastKnownNumberGetsTooOld(t *testing.T) {
	db := deployed(t)
	away := make(chan struct{})
	client := serve(t, Config{DB: switched{db, away}, knownFor: time.Second})
	for known := false; !known; { // until it is read within a second
		decide(t, db, 4, 0)
		_, err := client.IsActive(t.Context(), ref("llama"))
		known = err == nil
	}
	close(away)
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		_, err := client.IsActive(t.Context(), ref("llama"))
		if status.Code(err) == codes.Unavailable {
			return
		}
		if err != nil || time.Now().After(end) {
			t.Fatalf("the last known number is given out for ever: %v", err)
		}
	}
}

func TestAStreamSaysEachChange(t *testing.T) {
	db := deployed(t)
	client := serve(t, Config{DB: db, poll: 10 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := client.StreamIsActive(ctx, ref("llama"))
	if err != nil {
		t.Fatal(err)
	}
	for _, desired := range []int{0, 2, 0, 1} {
		decide(t, db, desired, 0)
		got, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got.GetResult() != (desired > 0) {
			t.Errorf("%d decided, the stream says %v", desired, got.GetResult())
		}
	}
	wrong, err := client.StreamIsActive(ctx, ref("nobody"))
	if err == nil {
		_, err = wrong.Recv()
	}
	if status.Code(err) != codes.NotFound {
		t.Errorf("a stream about an unknown deployment ends in %v", err)
	}
}

// counted is a database that counts statements, and answers none before it is let go.
type counted struct {
	postgres.DB
	begun *atomic.Int32
	hold  chan struct{}
}

var errAway = errors.New("connection refused")

func (c counted) Query(context.Context, string, ...any) (pgx.Rows, error) {
	c.begun.Add(1)
	<-c.hold
	return nil, errAway
}

func TestManyCallersShareOneStatement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := counted{begun: new(atomic.Int32), hold: make(chan struct{})}
		scaler := New(Config{DB: db})
		var callers sync.WaitGroup
		for range 200 {
			callers.Go(func() {
				if _, err := scaler.read(t.Context(), "llama"); !errors.Is(err, errAway) {
					t.Errorf("got %v", err)
				}
			})
		}
		synctest.Wait()
		if n := db.begun.Load(); n != 1 {
			t.Errorf("%d statements for 200 callers at once", n)
		}
		close(db.hold)
		callers.Wait()
	})
}
