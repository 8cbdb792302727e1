package web

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/operator"
)

// databaseView is the state of the database, and what the doctor says.
type databaseView struct {
	Server      operator.ServerState
	Connections float64 // share of those that there may be
	Claim       claimLatency
	Tables      []operator.Table
	Partitions  []partitionRow
	Snapshots   []operator.Snapshotted
	Findings    []doctor.Finding
	ExaminedAt  *time.Time
	Examining   bool
	Problem     string
}

// Release is the version of the server without the name of its package: 15.18.
func (v databaseView) Release() string {
	release, _, _ := strings.Cut(v.Server.Version, " ")
	return release
}

// Schema is the first digits of the hash of the schema's functions.
func (v databaseView) Schema() string { return v.Server.Functions[:min(len(v.Server.Functions), 7)] }

const (
	examineEvery = time.Minute
	examineMax   = time.Minute
	findingsFor  = examineEvery + 2*examineMax
)

// examination is the last examination by the doctor, and whether one goes on. It takes longer than
// a page may.
type examination struct {
	mu       sync.Mutex
	going    bool
	ended    time.Time // the last
	at       time.Time // of the findings: the end of the last that has some
	findings []doctor.Finding
	err      error
}

// last returns the newest findings, the time that they are of, and the error of the last examination. It begins another
// examination in the background if the last is too old.
func (e *examination) last(run func(context.Context) ([]doctor.Finding, error)) (findings []doctor.Finding,
	at *time.Time, going bool, err error,
) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if run != nil && !e.going && time.Since(e.ended) > examineEvery {
		e.going = true
		go e.examine(run)
	}
	if !e.at.IsZero() {
		last := e.at
		at = &last
	}
	return e.findings, at, e.going, e.err
}

func (e *examination) examine(run func(context.Context) ([]doctor.Finding, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), examineMax)
	defer cancel()
	findings, err := run(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.going, e.ended, e.err = false, time.Now(), err
	if err == nil {
		e.findings, e.at = findings, e.ended
	}
}

func (d *Dashboard) databasePages() {
	d.page(page{
		path: "database", nav: "Database", section: "System", title: "Database",
		template: "database", live: true, read: d.showDatabase,
	})
}

func (d *Dashboard) showDatabase(ctx context.Context, _ query) (any, error) {
	var v databaseView
	var err error
	if v.Server, err = cached(ctx, d, "server", 5*time.Second, d.db.ServerState); err != nil {
		return nil, err
	}
	if v.Server.MaxConnections > 0 {
		v.Connections = float64(v.Server.Connections) / float64(v.Server.MaxConnections)
	}
	v.Tables, err = cached(ctx, d, "tables", 30*time.Second,
		func(ctx context.Context) ([]operator.Table, error) { return d.db.Tables(ctx, 40) })
	if err != nil {
		return nil, err
	}
	partitions, err := cached(ctx, d, "partitions", 30*time.Second,
		func(ctx context.Context) ([]operator.Partition, error) { return d.db.Partitions(ctx, partitionsMax) })
	if err != nil {
		return nil, err
	}
	v.Partitions = partitionRows(partitions)
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, err
	}
	v.Claim = d.claims.add(nodes, time.Now())
	v.Snapshots, err = cached(ctx, d, "snapshots", 2*time.Second,
		func(ctx context.Context) ([]operator.Snapshotted, error) { return d.db.Snapshots(ctx, 5) })
	if err != nil {
		return nil, err
	}
	findings, at, going, err := d.examined.last(d.cfg.Examine)
	v.ExaminedAt, v.Examining = at, going
	if err != nil {
		v.Problem = "The last examination failed: " + d.troubleOf(err, statusOf(err)).Text
	}
	rank := map[doctor.Severity]int{doctor.Critical: 0, doctor.Warning: 1, doctor.Skipped: 2, doctor.Fine: 3}
	v.Findings = slices.Clone(findings)
	slices.SortStableFunc(v.Findings, func(a, b doctor.Finding) int { return rank[a.Severity] - rank[b.Severity] })
	return v, nil
}
