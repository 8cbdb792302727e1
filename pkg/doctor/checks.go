package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// check is one check of the examination. Its finding has severity fine unless it sets another.
type check struct {
	name string
	run  func(ctx context.Context, tx pgx.Tx, cfg Config) (Finding, error)
}

// checks are run in this order: preconditions of the others first.
var checks = []check{
	{"version", checkVersion},
	{"schema", func(ctx context.Context, _ pgx.Tx, cfg Config) (Finding, error) { return cfg.Schema(ctx) }},
	{"encoding", checkEncoding},
	{"durability", checkDurability},
	{"standby", checkStandby},
	{"isolation", checkIsolation},
	{"settings", checkSettings},
	{"public schema", checkPublic},
	{"rights", checkRights},
	{"clock", checkClock},
	{"connections", checkConnections},
	{"lock table", checkLockTable},
	{"horizon", checkHorizon},
	{"wraparound", checkWraparound},
	{"vacuum", checkVacuum},
	{"notifications", checkNotifications},
	{"partitions", checkPartitions},
	{"publications", checkPublications},
	{"watches", checkWatches},
	{"sequences", checkSequences},
	{"leader", checkLeader},
	{"late entries", checkLate},
	{"stuck locks", checkStuck},
	{"unserved queues", checkUnserved},
	{"standstills", checkStandstills},
	{"dead slots", checkDeadSlots},
	{"instances", checkInstances},
	{"hints", checkHints},
	{"room", checkRoom},
	{"blocked keys", checkBlockedKeys},
	{"cron jobs", checkCronJobs},
	{"callbacks", checkCallbacks},
	{"pauses", checkPaused},
	{"tokens", checkTokens},
	{"invariants", checkInvariants},
}

// texts reads the first column of a query, a line a row.
func texts(ctx context.Context, tx pgx.Tx, sql string) ([]string, error) {
	return pgx.CollectRows(postgres.Query(ctx, tx, sql), pgx.RowTo[string])
}
