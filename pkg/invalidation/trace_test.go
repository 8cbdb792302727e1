package invalidation

import (
	"testing"

	"go.opentelemetry.io/otel/trace"
)

func TestPushThatNobodyTracesAllocatesNothingForIt(t *testing.T) {
	ctx, pushes := t.Context(), []Push{{}}
	allocated := testing.AllocsPerRun(100, func() {
		_, span, same := startPush(ctx, "work", pushes)
		if same[0].Trace != "" || span.IsRecording() {
			t.Error("the push is traced")
		}
		span.End()
	})
	if allocated != 0 {
		t.Errorf("%g allocations", allocated)
	}
}

// A caller's span is what its entries stand below, though nothing records it here; one that an entry names comes first.
func TestEntriesRememberTheSpanOfTheirPush(t *testing.T) {
	b := newBed(t, Config{})
	const named = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	caller := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	ctx := trace.ContextWithSpanContext(b.ctx, caller)
	if _, err := b.q.Push(ctx, Push{Payload: []byte(`{}`)}, Push{Payload: []byte(`{}`), Trace: named}, Push{Payload: []byte(`{}`)}); err != nil {
		t.Fatal(err)
	}
	b.exec(b.pool, `UPDATE penstock.entry SET trace = 'nonsense' WHERE id = (SELECT max(id) FROM penstock.entry)`)
	locks := b.claim(3)
	if len(locks) != 3 {
		t.Fatalf("%d locks", len(locks))
	}
	if got := trace.SpanContextFromContext(locks[0].Entries[0].Below(b.ctx)); got.SpanID() != caller.SpanID() || got.TraceID() != caller.TraceID() || !got.IsSampled() {
		t.Errorf("the first entry is below %+v", got)
	}
	if got := locks[1].Entries[0]; got.Trace != named || TraceParent(got.Below(b.ctx)) != named {
		t.Errorf("the second entry has %q", got.Trace)
	}
	if got := trace.SpanContextFromContext(locks[2].Entries[0].Below(b.ctx)); got.IsValid() {
		t.Errorf("nonsense is read as %+v", got)
	}
}
