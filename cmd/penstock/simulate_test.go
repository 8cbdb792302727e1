package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// A simulation may take minutes: an interrupt ends it.
func TestASimulationEndsAtAnInterrupt(t *testing.T) {
	var out, errs bytes.Buffer
	a := newApp(strings.NewReader(""), &out, &errs, func(string) string { return "" })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if code := run(ctx, a, []string{"scale", "simulate", "--policy", "static"}); code == 0 || out.Len() > 0 {
		t.Errorf("exit %d, %s", code, out.String())
	}
}

func TestOnlyNamedPoliciesArePlayed(t *testing.T) {
	out, errs, code := command(t, nil, "scale", "simulate", "--policy", "static", "--policy", "clair", "--max", "2")
	if code != 0 || !strings.Contains(out, "static") || !strings.Contains(out, "clairvoyant") || strings.Contains(out, "hpa") {
		t.Errorf("exit %d, %s%s", code, out, errs)
	}
	if _, errs, code := command(t, nil, "scale", "simulate", "--policy", "nobody"); code != exitUsage || !strings.Contains(errs, "nobody") {
		t.Errorf("exit %d, %s", code, errs)
	}
}
