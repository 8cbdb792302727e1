package invalidation

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// A trace follows an entry from its push to its callback by the trace context that is stored with it. Spans begin where
// the context of a caller carries one that records, and on task nodes that have a tracer; elsewhere all of this costs
// one look at the context. Names and attributes are OpenTelemetry's conventions for messaging.

// TracerName is the instrumentation scope of all spans.
const TracerName = "github.com/penstock/penstock"

const traceparent = "traceparent"

// StartSpan begins a span below that of ctx, by the same provider; without one that records, it begins nothing.
func StartSpan(ctx context.Context, name string, kind trace.SpanKind,
	attributes ...attribute.KeyValue,
) (context.Context, trace.Span) {
	above := trace.SpanFromContext(ctx)
	if !above.IsRecording() {
		return ctx, above // its End does nothing
	}
	return above.TracerProvider().Tracer(TracerName).Start(ctx, name, trace.WithSpanKind(kind),
		trace.WithAttributes(attributes...))
}

// TraceParent is the span of ctx as a W3C traceparent, empty if there is none.
func TraceParent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[traceparent]
}

var traceParent = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// ValidTraceParent reports whether text is a W3C traceparent (https://www.w3.org/TR/trace-context/#traceparent-header).
func ValidTraceParent(text string) bool {
	return traceParent.MatchString(text) && text[:2] != "ff" && text[3:35] != strings.Repeat("0", 32) &&
		text[36:52] != strings.Repeat("0", 16)
}

// Below is ctx below the span that pushed the entry, so far as the entry knows of one.
func (e *Entry) Below(ctx context.Context) context.Context {
	if e.Trace == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: e.Trace})
}

// Messaging are the attributes of every span about a queue. kind is send, receive, process or settle.
func Messaging(queue, operation, kind string) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("messaging.system", "penstock"), attribute.String("messaging.destination.name", queue),
		attribute.String("messaging.operation.name", operation), attribute.String("messaging.operation.type", kind),
	}
}

// startPush begins the span of a push, and returns the pushes with the trace context of those that name none.
func startPush(ctx context.Context, queue string, pushes []Push) (context.Context, trace.Span, []Push) {
	span := trace.SpanFromContext(ctx)
	if span.IsRecording() {
		attributes := append(Messaging(queue, "push", "send"),
			attribute.Int("messaging.batch.message_count", len(pushes)))
		ctx, span = StartSpan(ctx, "push "+queue, trace.SpanKindProducer, attributes...)
	} else {
		span = trace.SpanFromContext(context.Background()) // not ours to end
	}
	if parent := TraceParent(ctx); parent != "" {
		pushes = slices.Clone(pushes)
		for i := range pushes {
			pushes[i].Trace = cmp.Or(pushes[i].Trace, parent)
		}
	}
	return ctx, span, pushes
}
