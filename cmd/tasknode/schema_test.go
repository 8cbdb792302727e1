package main

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
)

func TestNodeOnASchemaThatIsTooOldSaysWhatIsMissing(t *testing.T) {
	cfg := defaults()
	cfg.Database.URL = pgtest.Empty(t)
	var old *migrations.OldError
	if err := run(t.Context(), cfg, slog.New(slog.DiscardHandler)); !errors.As(err, &old) || old.Missing != "00001_baseline.sql" {
		t.Errorf("on an empty database it says %v", err)
	}
}
