package tasknode

import (
	"context"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/pkg/invalidation"
)

// traced is what the spans of a lock have to know of one another. It is nil while nothing is traced.
type traced struct {
	claim trace.SpanContext

	mu   sync.Mutex // the lock's entries run while earlier ones are recorded
	runs map[invalidation.EntryID]ranAt
}

type ranAt struct {
	span  trace.SpanContext
	ended time.Time
}

// another is the same for another lock of the claim.
func (t *traced) another() *traced {
	if t == nil {
		return nil
	}
	return &traced{claim: t.claim}
}

// linksMax bounds the entries that the span of a claim is linked to.
const linksMax = 128

// traceClaim makes the span of a claim that brought something, linked to where its entries were pushed.
func (n *Node) traceClaim(queue string, locks []*invalidation.Lock, start time.Time) *traced {
	if n.cfg.Tracer == nil || len(locks) == 0 {
		return nil
	}
	var links []trace.Link
	entries := 0
	for _, l := range locks {
		entries += len(l.Entries)
		for i := range l.Entries {
			if pushed := pushedBy(&l.Entries[i]); pushed.IsValid() && len(links) < linksMax {
				links = append(links, trace.Link{SpanContext: pushed})
			}
		}
	}
	_, span := n.cfg.Tracer.Start(context.Background(), "claim "+queue, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithTimestamp(start), trace.WithLinks(links...),
		trace.WithAttributes(invalidation.Messaging(queue, "claim", "receive")...),
		trace.WithAttributes(attribute.Int("messaging.batch.message_count", entries),
			attribute.Int("penstock.locks", len(locks))))
	span.End()
	return &traced{claim: span.SpanContext()}
}

func pushedBy(e *invalidation.Entry) trace.SpanContext {
	return trace.SpanContextFromContext(e.Below(context.Background()))
}

// startRun begins the span of a run: below the push of its entry, so that one trace tells its whole life, or where it
// has several in a trace of its own that is linked to each push. Without a tracer it begins nothing.
func (n *Node) startRun(ctx context.Context, j *job, runs []*invalidation.Run) (context.Context, trace.Span) {
	if j.traced == nil {
		return ctx, nil
	}
	links := []trace.Link{{SpanContext: j.traced.claim}}
	attributes := append(invalidation.Messaging(j.served.name, "process", "process"),
		attribute.Int64("penstock.token", int64(j.lock.Token)), attribute.String("penstock.node", n.cfg.Name))
	if len(runs) == 1 {
		e := &runs[0].Entry
		ctx = e.Below(ctx)
		attributes = append(attributes, attribute.String("messaging.message.id", strconv.FormatInt(int64(e.ID), 10)),
			attribute.Int("penstock.attempt", e.Attempt+1))
	} else {
		attributes = append(attributes, attribute.Int("messaging.batch.message_count", len(runs)))
		for _, r := range runs[:min(len(runs), linksMax)] {
			links = append(links, trace.Link{SpanContext: pushedBy(&r.Entry)})
		}
	}
	return n.cfg.Tracer.Start(ctx, "process "+j.served.name, trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithLinks(links...), trace.WithAttributes(attributes...))
}

// endRun ends the span of a run.
func endRun(span trace.Span, j *job, runs []*invalidation.Run, err error) {
	if span == nil {
		return
	}
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
	j.traced.mu.Lock()
	defer j.traced.mu.Unlock()
	if j.traced.runs == nil {
		j.traced.runs = map[invalidation.EntryID]ranAt{}
	}
	for _, r := range runs {
		j.traced.runs[r.Entry.ID] = ranAt{span.SpanContext(), time.Now()}
	}
}

// traceEndings makes the span of each ending of a pile: from the end of its run until it was recorded, or refused since
// its token is not among those that were ours.
func (n *Node) traceEndings(p pile, ours func(invalidation.Token) bool) {
	if n.cfg.Tracer == nil {
		return
	}
	for i := range p.endings {
		e, j := &p.endings[i], p.jobs[i]
		if j.traced == nil {
			continue
		}
		j.traced.mu.Lock()
		ran, known := j.traced.runs[e.Entry]
		delete(j.traced.runs, e.Entry)
		j.traced.mu.Unlock()
		if !known {
			continue // it did not run
		}
		_, span := n.cfg.Tracer.Start(trace.ContextWithSpanContext(context.Background(), ran.span), "settle "+
			j.served.name,
			trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(ran.ended), trace.WithAttributes(
				append(invalidation.Messaging(j.served.name, e.Verb(), "settle"),
					attribute.String("messaging.message.id", strconv.FormatInt(int64(e.Entry), 10)),
					attribute.Int("messaging.batch.message_count", len(p.endings)))...))
		if !ours(e.Lock.Token) {
			span.SetStatus(codes.Error, "refused: the lock was lost")
		}
		span.End()
	}
}
