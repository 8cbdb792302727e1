package telemetry

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/internal/httpserver"
)

// NewTracing exports spans of a service to an OTLP address over HTTP: all of those whose caller wants it, and
// this share of those without a caller. stop sends what is buffered, for three seconds at most; call it
// before the program ends. Without an address the provider is nil.
func NewTracing(ctx context.Context, service, address string, share float64) (provider trace.TracerProvider,
	stop func(), err error,
) {
	if address == "" {
		return nil, func() {}, nil
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(address))
	if err != nil {
		return nil, nil, fmt.Errorf("export traces to %s: %w", address, err)
	}
	exporting := sdk.NewTracerProvider(sdk.WithBatcher(exporter),
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(share))),
		sdk.WithResource(resource.NewSchemaless(attribute.String("service.name", service))))
	return exporting, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		_ = exporting.Shutdown(ctx) // what cannot be sent by then is lost
	}, nil
}

// Traced makes a span of each request to /v1 and the like, below the one that its traceparent
// names. That header ends here: entries that the request pushes are children of the span of its
// push.
func Traced(tracer trace.Tracer, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Count(r.URL.Path, "/") < 2 { // probes and metrics
			next.ServeHTTP(w, r)
			return
		}
		ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		ctx, span := tracer.Start(ctx, r.Method, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(
			attribute.String("http.request.method", r.Method), attribute.String("url.path", withoutKey(r.URL.Path))))
		defer span.End()
		r = r.WithContext(ctx)
		r.Header.Del("Traceparent")
		noted := httpserver.NewStatusWriter(w)
		next.ServeHTTP(noted, r)
		span.SetAttributes(attribute.Int("http.response.status_code", noted.Status))
		if noted.Status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, http.StatusText(noted.Status))
		}
	})
}

// withoutKey cuts the key off the path of a prediction's stream: whoever has it reads the stream without a token.
func withoutKey(path string) string {
	const before = "/stream/"
	if at := strings.Index(path, before); at >= 0 {
		return path[:at+len(before)]
	}
	return path
}
