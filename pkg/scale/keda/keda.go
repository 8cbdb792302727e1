package keda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/scale/keda/externalscaler"
)

// Config says where the numbers are. DB is required.
type Config struct {
	DB  postgres.DB
	Log *slog.Logger // nowhere

	// Tests set these. knownFor is how old a number may be that is given out: 5 min. It ages from its decision on, also
	// while the database answers and no leader decides.
	knownFor time.Duration
	poll     time.Duration // between two reads for streams: 250 ms
	timeout  time.Duration // of one read: 2 s
}

// External is the external scaler. The metadata of a trigger name a deployment of backend keda: {"deployment":
// "llama-own"}. The metric is the number of instances that were decided, and its target is 1.
type External struct {
	externalscaler.UnimplementedExternalScalerServer
	cfg   Config
	reads singleflight.Group // one statement at a time serves all streams and calls

	failing duty.FailingEach // by deployment

	mu    sync.Mutex
	known map[string]number
}

// number is a decision as it was read.
type number struct {
	desired int
	decided time.Time // on the clock of this process
}

// New returns the scaler.
func New(cfg Config) *External {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.knownFor = cmp.Or(cfg.knownFor, 5*time.Minute)
	cfg.poll = cmp.Or(cfg.poll, 250*time.Millisecond)
	cfg.timeout = cmp.Or(cfg.timeout, 2*time.Second)
	return &External{cfg: cfg, known: map[string]number{}}
}

// Register adds the scaler to a gRPC server.
func (s *External) Register(to grpc.ServiceRegistrar) {
	externalscaler.RegisterExternalScalerServer(to, s)
}

// numbersSQL reads the numbers of all deployments, and whether they are to be applied. Several deployments of a model
// have a share each. The age is that of scale_state.decided_at, which moves at least every 5 s while a leader decides;
// deployment_state.decided_at moves only when the number changes or starts are replaced.
const numbersSQL = `
SELECT d.name, d.backend, d.mode IN ('advise', 'disabled')
       OR EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true') AS held,
       s.desired, extract(epoch FROM clock_timestamp() - t.decided_at)::float8 AS age
  FROM penstock.deployment d
  LEFT JOIN penstock.deployment_state s ON s.name = d.name AND s.decided_at IS NOT NULL
  LEFT JOIN penstock.scale_state t ON t.model = d.model`

var (
	errHeld      = errors.New("scaling is off, or the mode of the deployment permits no change")
	errUndecided = errors.New("there is no decision about the deployment yet")
)

// decided is a deployment with its number.
type decided struct {
	Name    string
	Backend string
	Held    bool
	Desired *int
	Age     *float64
}

// sheet is all deployments as they were at a time on the clock of this process.
type sheet struct {
	asked time.Time
	rows  map[string]decided
}

// readAll reads all deployments. Those who ask while a statement is under way get its answer: many streams use one
// connection.
func (s *External) readAll(ctx context.Context) (sheet, error) {
	answer := s.reads.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.timeout)
		defer cancel()
		all := sheet{time.Now(), map[string]decided{}}
		rows, err := pgx.CollectRows(postgres.Query(ctx, s.cfg.DB, numbersSQL), pgx.RowToStructByName[decided])
		for _, row := range rows {
			all.rows[row.Name] = row
		}
		return all, err
	})
	select {
	case <-ctx.Done():
		return sheet{}, ctx.Err()
	case result := <-answer:
		all, _ := result.Val.(sheet)
		return all, result.Err
	}
}

// read returns the number of a deployment from the database.
func (s *External) read(ctx context.Context, deployment string) (number, error) {
	all, err := s.readAll(ctx)
	if err != nil {
		return number{}, fmt.Errorf("read deployment %q: %w", deployment, err)
	}
	found, exists := all.rows[deployment]
	switch {
	case !exists:
		return number{}, status.Errorf(codes.NotFound, "deployment %q does not exist", deployment)
	case found.Backend != "keda":
		return number{}, status.Errorf(codes.FailedPrecondition, "deployment %q has backend %s, not keda", deployment,
			found.Backend)
	case found.Held:
		return number{}, errHeld
	case found.Desired == nil || found.Age == nil:
		return number{}, errUndecided
	}
	return number{*found.Desired, all.asked.Add(-time.Duration(*found.Age * float64(time.Second)))}, nil
}

// readStep is the name in the log of what current does. KEDA gets the last known number while it fails.
const readStep = "read the number of a deployment"

// current is the number of a deployment: read now, or the last one that was read and is not too old. Without either it
// is an error of status UNAVAILABLE.
func (s *External) current(ctx context.Context, ref *externalscaler.ScaledObjectRef) (int, error) {
	deployment := ref.GetScalerMetadata()["deployment"]
	if deployment == "" {
		return 0, status.Error(codes.InvalidArgument, "metadata of the trigger: want deployment, one of backend keda")
	}
	n, err := s.read(ctx, deployment)
	switch {
	case err == nil:
		s.failing.Note(ctx, s.cfg.Log, slog.LevelWarn, readStep, deployment, nil, "deployment", deployment)
		s.keep(deployment, n)
	case errors.Is(err, errHeld), errors.Is(err, errUndecided):
		s.forget(deployment)
		return 0, status.Errorf(codes.Unavailable, "deployment %q: %v", deployment, err)
	case status.Code(err) != codes.Unknown: // it has a status of its own
		s.forget(deployment)
		return 0, err
	default:
		s.failing.Note(ctx, s.cfg.Log, slog.LevelWarn, readStep, deployment, err, "deployment", deployment)
		s.mu.Lock()
		kept, is := s.known[deployment]
		s.mu.Unlock()
		if !is {
			return 0, status.Errorf(codes.Unavailable, "deployment %q: %v", deployment, err)
		}
		n = kept
	}
	if age := time.Since(n.decided); age > s.cfg.knownFor {
		return 0, status.Errorf(codes.Unavailable, "the last decision about deployment %q is %v old", deployment,
			age.Round(time.Second))
	}
	return n.desired, nil
}

// knownMax bounds the deployments whose numbers are kept: names come from callers, numbers only from the database.
const knownMax = 10_000

func (s *External) keep(deployment string, n number) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, is := s.known[deployment]; !is && len(s.known) >= knownMax {
		return
	}
	s.known[deployment] = n
}

func (s *External) forget(deployment string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, deployment)
}

// IsActive implements externalscaler.ExternalScalerServer.
func (s *External) IsActive(
	ctx context.Context, ref *externalscaler.ScaledObjectRef,
) (*externalscaler.IsActiveResponse, error) {
	n, err := s.current(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &externalscaler.IsActiveResponse{Result: n > 0}, nil
}

// StreamIsActive implements externalscaler.ExternalScalerServer: it says at once whether the deployment is to have
// instances, and again at each change, so that the first request of an idle model waits for no poll of KEDA. While
// the number is not known it says nothing.
func (s *External) StreamIsActive(
	ref *externalscaler.ScaledObjectRef, to grpc.ServerStreamingServer[externalscaler.IsActiveResponse],
) error {
	ctx := to.Context()
	ticks := time.NewTicker(s.cfg.poll)
	defer ticks.Stop()
	for told, last := false, false; ; {
		n, err := s.current(ctx, ref)
		switch code := status.Code(err); {
		case err == nil && (!told || last != (n > 0)):
			told, last = true, n > 0
			if err := to.Send(&externalscaler.IsActiveResponse{Result: last}); err != nil {
				return err
			}
		case err != nil && code != codes.Unavailable && ctx.Err() == nil:
			return err
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-ticks.C:
		}
	}
}

// metricName is the name of the only metric.
const metricName = "penstock-instances"

// GetMetricSpec implements externalscaler.ExternalScalerServer. It is the same for each deployment, and asks nothing.
func (s *External) GetMetricSpec(
	context.Context, *externalscaler.ScaledObjectRef,
) (*externalscaler.GetMetricSpecResponse, error) {
	return &externalscaler.GetMetricSpecResponse{
		MetricSpecs: []*externalscaler.MetricSpec{{MetricName: metricName, TargetSize: 1, TargetSizeFloat: 1}},
	}, nil
}

// GetMetrics implements externalscaler.ExternalScalerServer.
func (s *External) GetMetrics(
	ctx context.Context, in *externalscaler.GetMetricsRequest,
) (*externalscaler.GetMetricsResponse, error) {
	n, err := s.current(ctx, in.GetScaledObjectRef())
	if err != nil {
		return nil, err
	}
	return &externalscaler.GetMetricsResponse{MetricValues: []*externalscaler.MetricValue{{
		MetricName: metricName, MetricValue: int64(n), MetricValueFloat: float64(n),
	}}}, nil
}
