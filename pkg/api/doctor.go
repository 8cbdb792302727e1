package api

import (
	"context"
	"time"

	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/doctor"
)

// doctorTimeout bounds an examination. Each of its checks has a limit of its own.
const doctorTimeout = time.Minute

func (a *API) doctorRoutes() {
	add(a, route{
		method: "GET", path: "/v1/doctor", id: "examine",
		summary: "Examine the database and the processes that use it; one examination at a time",
		scope:   operate, of: ofPlatform, timeout: doctorTimeout,
	}, a.examine)
	add(a, route{
		method: "GET", path: "/v1/migrations", id: "list-migrations",
		summary: "Migrations of the schema, and whether they are applied, pending or unknown to this leader",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, _ *struct{}) (*answer[list[migrations.Status]], error) {
		found, err := migrations.List(ctx, a.db)
		return pageOf(found, Paging{Limit: len(found)}, nil), err
	})
}

// examine runs the doctor's checks, without those that read every row. A second examination at the same time is
// refused: each holds two connections of the pool that requests use.
func (a *API) examine(ctx context.Context, _ *struct{}) (*answer[list[doctor.Finding]], error) {
	if !a.examining.TryLock() {
		return nil, errBusy
	}
	defer a.examining.Unlock()
	found, err := doctor.Examine(ctx, a.db, doctor.Config{
		Schema: func(ctx context.Context) (doctor.Finding, error) { return doctor.Schema(ctx, a.db) },
	})
	return pageOf(found, Paging{Limit: len(found)}, nil), err
}
