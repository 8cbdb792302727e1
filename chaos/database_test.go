package main

import (
	"context"
	"testing"
	"time"
)

// Statements of the harness that wait, as for a lock that the product holds, do not make Postgres slow to it: that lock
// would excuse what it delays.
func TestATimedCommitWaitsForNoOtherStatement(t *testing.T) {
	db, err := startDatabase(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.close()
	for range db.pool.Config().MaxConns {
		used, err := db.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer used.Release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := db.commit(ctx); err != nil {
		t.Errorf("with all other connections in use: %v", err)
	}
}
