package gateway

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A gateway whose row was deleted, as after an outage that was longer than recovery waits, goes on as another incarnation:
// what the one before held is not its own.
func TestAGatewayThatWasForgottenRegistersAnew(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m := NewRegistration(RegistrationConfig{
		Name: "g", Lease: time.Hour, Beat: time.Minute, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Status: func() map[string]any { return map[string]any{"pools": 1} },
	}, x.pool)
	if err := m.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := m.ID()
	if err := m.beat(t.Context()); err != nil || m.ID() != before {
		t.Fatalf("a heartbeat of a gateway that is known: %v, or it has another incarnation", err)
	}
	x.exec(`DELETE FROM penstock.node WHERE id = $1`, before)
	for range 2 {
		if err := m.beat(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if m.ID() == before {
		t.Error("the gateway goes on under the id that was forgotten")
	}
	if n := x.count(`SELECT count(*) FROM penstock.node WHERE kind = 'gateway' AND name = 'g' AND load ? 'pools'`); n != 1 {
		t.Errorf("%d gateways are known, want the new incarnation, with its report", n)
	}
	if err := m.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := x.count(`SELECT count(*) FROM penstock.node`); n != 0 {
		t.Errorf("%d rows are left behind its end", n)
	}
}

// A snapshot has the hashes of tokens: its owner alone may read it.
func TestSnapshotIsForItsOwnerAlone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "snapshot")
	if err := os.WriteFile(path, nil, 0o644); err != nil { //nolint:gosec // the file before may be readable by others
		t.Fatal(err)
	}
	if err := (SavedState{At: time.Now()}).Write(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the mode is %v, want 0600: %v", info.Mode().Perm(), err)
	}
}
