package web

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const (
	causeStep       = 5 * time.Minute
	causeSteps      = 12
	causeQueuesMax  = 8 // queues whose failures are grouped on one page
	failuresPerPage = 50
)

// failuresView is the failures by cause, or those of one cause.
type failuresView struct {
	Queue, Class, Fingerprint string
	Queues                    []string
	Groups                    []causeGroup
	Rows                      []operator.Failure // of one cause
	Next                      int64              // id before which the next page begins; 0: there is none
	Before                    int64
	Total                     int64
	Skipped                   int // queues with failures that are not on the page
	Reached                   bool
}

// causeGroup is the failures of a queue with the same class and fingerprint.
type causeGroup struct {
	Queue, Class, Fingerprint string
	Failures                  int64
	Newest                    time.Time
	ExampleID                 int64
	Example                   string
	Trend                     template.HTML
	steps                     []float64
}

func (d *Dashboard) failurePages() {
	d.page(page{
		path: "failures", nav: "Failures", section: "Work", title: "Failures",
		template: "failures", live: true, read: d.listFailures,
	})
}

func (d *Dashboard) listFailures(ctx context.Context, q query) (any, error) {
	queues, err := d.sampledQueues(ctx)
	if err != nil {
		return nil, err
	}
	v := failuresView{
		Queue: q.Get("queue"), Class: q.Get("class"), Fingerprint: q.Get("fingerprint"),
		Before: q.Int("before"),
	}
	var failing []operator.Queue
	for _, x := range queues {
		v.Total += x.Failed
		if x.Failed > 0 {
			failing = append(failing, x)
			v.Queues = append(v.Queues, x.Name)
		}
	}
	if v.Queue != "" && !slices.Contains(v.Queues, v.Queue) {
		v.Queues = append(v.Queues, v.Queue)
	}
	if v.Queue != "" && v.Fingerprint != "" {
		return d.failuresOfCause(ctx, v)
	}
	names := []string{v.Queue}
	if v.Queue == "" {
		slices.SortFunc(failing, func(a, b operator.Queue) int { return cmp.Compare(b.Failed, a.Failed) })
		v.Skipped = max(0, len(failing)-causeQueuesMax)
		names = names[:0]
		for _, x := range failing[:min(len(failing), causeQueuesMax)] {
			names = append(names, x.Name)
		}
	}
	for _, name := range names {
		groups, err := d.causeGroups(ctx, name)
		if err != nil {
			return nil, err
		}
		v.Groups = append(v.Groups, groups...)
	}
	slices.SortStableFunc(v.Groups, func(a, b causeGroup) int { return cmp.Compare(b.Failures, a.Failures) })
	v.Groups = v.Groups[:min(len(v.Groups), 60)]
	return v, nil
}

// causeGroups groups the newest failures of a queue by cause.
func (d *Dashboard) causeGroups(ctx context.Context, queue string) ([]causeGroup, error) {
	found, err := cached(ctx, d, keyOf("causes", queue), 5*time.Second,
		func(ctx context.Context) ([]operator.CauseStep, error) {
			return d.db.CauseSteps(ctx, queue, causeStep, causeSteps)
		})
	if err != nil {
		return nil, err
	}
	byCause := map[[2]string]*causeGroup{}
	for _, s := range found {
		key := [2]string{s.Class, s.Fingerprint}
		g := byCause[key]
		if g == nil {
			g = &causeGroup{
				Queue: queue, Class: s.Class, Fingerprint: s.Fingerprint,
				steps: make([]float64, causeSteps),
			}
			byCause[key] = g
		}
		g.Failures += s.Failures
		if s.Newest.After(g.Newest) {
			g.Newest = s.Newest
		}
		if s.Example != "" && s.ExampleID > g.ExampleID || g.ExampleID == 0 {
			g.ExampleID, g.Example = s.ExampleID, s.Example
		}
		if s.Step >= 0 && s.Step < causeSteps {
			g.steps[causeSteps-1-s.Step] += float64(s.Failures)
		}
	}
	groups := make([]causeGroup, 0, len(byCause))
	for _, g := range byCause {
		g.Trend = picture.Sparkline{Title: "failures in steps of 5 minutes, last hour", Values: g.steps}.HTML()
		groups = append(groups, *g)
	}
	slices.SortFunc(groups, func(a, b causeGroup) int {
		return cmp.Or(cmp.Compare(b.Failures, a.Failures), strings.Compare(a.Fingerprint, b.Fingerprint))
	})
	return groups, nil
}

// failuresOfCause lists the failures of one cause.
func (d *Dashboard) failuresOfCause(ctx context.Context, v failuresView) (any, error) {
	filter := operator.FailureFilter{
		Queue: v.Queue, Class: v.Class, Fingerprint: v.Fingerprint, Before: v.Before,
		Limit: failuresPerPage + 1,
	}
	found, err := cached(ctx, d, keyOf("failures", filter), 2*time.Second,
		func(ctx context.Context) ([]operator.Failure, error) { return d.db.Failures(ctx, filter) })
	if err != nil {
		return nil, fmt.Errorf("list failures: %w", err)
	}
	v.Rows = found
	if len(found) > failuresPerPage {
		v.Rows = found[:failuresPerPage]
		v.Next = v.Rows[failuresPerPage-1].ID
	}
	return v, nil
}
