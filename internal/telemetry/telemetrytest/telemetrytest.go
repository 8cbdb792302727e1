// Package telemetrytest holds what a program shows at /metrics to the catalog.
package telemetrytest

import (
	"bytes"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/penstock/penstock/internal/telemetry"
)

// Check scrapes a program: the official parser must read the text and the linter accept it, and it must hold the
// program's whole catalog and nothing else of ours. It returns what was found.
func Check(t *testing.T, from int, g prometheus.Gatherer) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatalf("gather metrics: %v", err)
	}
	var text bytes.Buffer
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), telemetry.Prefix) {
			if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
				t.Fatalf("write %s: %v", f.GetName(), err)
			}
		}
	}
	problems, err := promlint.New(bytes.NewReader(text.Bytes())).Lint()
	if err != nil {
		t.Fatalf("lint metrics: %v", err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	parsed, err := parser.TextToMetricFamilies(&text)
	if err != nil {
		t.Fatalf("parse metrics: %v", err)
	}
	for _, m := range telemetry.Catalog() {
		f := parsed[telemetry.Prefix+m.Name]
		switch {
		case m.From&from == 0:
			if f != nil {
				t.Errorf("%s is there, but the catalog says it is another program's", m.Name)
			}
		case f == nil:
			t.Errorf("%s is in the catalog and not there", m.Name)
		case f.GetHelp() != m.Help || !strings.EqualFold(f.GetType().String(), m.Kind):
			t.Errorf("%s is a %s (%s), the catalog says %s (%s)", m.Name, f.GetType(), f.GetHelp(), m.Kind, m.Help)
		}
	}
	return parsed
}
