package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/worker"
)

// countingDB counts the readings of the registry, which fail.
type countingDB struct {
	postgres.DB
	readings atomic.Int64
}

type failedRow struct{}

func (failedRow) Scan(...any) error { return errors.New("not read") }

func (d *countingDB) QueryRow(context.Context, string, ...any) pgx.Row {
	d.readings.Add(1)
	return failedRow{}
}

// While requests wait for an instance, hints of changes have the instances read at once, but however many come, not more
// often than each refreshGap.
func TestStormOfHintsIsReadOnceInAGap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := gateway.New(gateway.Config{Open: true})
		policy := gateway.DefaultPolicy()
		mayStart := true
		policy.MayStart = &mayStart
		g.SetModels([]gateway.ModelState{{Name: "m", Protocol: worker.ProtocolOpenAI, Policy: policy}})
		db, log := &countingDB{}, slog.New(slog.DiscardHandler)
		d := &settingsDuty{
			gateway: g, registry: inference.NewRegistry(db, worker.Config{}, time.Second, log),
			ready: make(chan struct{}, 1), log: log,
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
		d.noticed("m")
		synctest.Wait()
		if n := db.readings.Load(); n != 0 {
			t.Errorf("%d readings though no request waits", n)
		}
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			body := strings.NewReader(`{"model":"m","messages":[]}`)
			g.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/chat/completions", body))
		}()
		synctest.Wait()
		const hints = 900 // one each millisecond, before the settings are read
		for range hints {
			d.noticed("m")
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		took, n := hints*time.Millisecond, db.readings.Load()
		if least, most := int64(took/refreshGap)-2, int64(took/refreshGap)+2; n < least || n > most {
			t.Errorf("%d readings in %s, want %d to %d", n, took, least, most)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		<-answered
	})
}

// A gateway that started from its snapshot keeps its models when the database answers again: they are not published, nor
// written to the snapshot, before they have been read.
func TestModelsOfTheSnapshotStayUntilTheyAreRead(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	cfg := defaults()
	cfg.Database.URL, cfg.Gateway.Open, cfg.Gateway.Name = s.dsn, true, "gateway"
	x := &server{cfg: cfg, log: s.log(), observer: newObserver(), pool: s.connect()}
	listen, err := cfg.Database.Connect(0).ListenConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := x.assemble(listen); err != nil {
		t.Fatal(err)
	}
	x.gateway.SetModels([]gateway.ModelState{{Name: "m", Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy()}})
	if err := x.settings.next(t.Context()); err != nil { // the registry has not had its turn
		t.Fatal(err)
	}
	if states := x.gateway.States(); len(states) != 1 || states[0].Model != "m" {
		t.Errorf("the models are %+v", states)
	}
	if models := x.settings.snapshot().Models; len(models) != 1 || len(models[0].Instances) != 1 {
		t.Errorf("the snapshot has %+v", models)
	}
}
