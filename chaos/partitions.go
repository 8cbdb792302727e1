package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// partitionSteps are the faults of maintenance: leaders make and drop a partition once a day, which no run lasts.
var partitionSteps = []step{{20, (*plan).turnPartitions}}

// turnPartitions lets partitions of results and failures be dropped and made beside the load, by the functions that
// leaders call, each time in a transaction of its own.
func (p *plan) turnPartitions() string {
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	if turned, err := p.site.db.turnPartitions(ctx); err != nil || turned == 0 {
		return "" // the database is away, or longer locks are in the way
	}
	return "partitions dropped and made"
}

// turnPartitions makes a partition that has passed its retention and takes the last one that was made ahead away. Then
// the product's own maintenance follows. It returns how many partitions that dropped and made.
func (d *database) turnPartitions(ctx context.Context) (turned int, err error) {
	for _, parent := range []string{"result", "failure"} {
		for _, sql := range []string{
			`CREATE TABLE IF NOT EXISTS penstock.%[1]s_20200101 PARTITION OF penstock.%[1]s
			     FOR VALUES FROM ('2020-01-01 00:00Z') TO ('2020-01-02 00:00Z')`,
			`DO $$ BEGIN EXECUTE (SELECT 'DROP TABLE penstock.' || relname FROM pg_class
			     WHERE relname ~ '^%[1]s_[0-9]{8}$' AND relname > to_char(now() + interval '1 day', '"%[1]s_"YYYYMMDD')
			     ORDER BY relname DESC LIMIT 1); END $$`,
		} {
			if err := d.soon(ctx, fmt.Sprintf(sql, parent)); err != nil {
				return turned, err
			}
		}
		for _, sql := range []string{
			`SELECT penstock.drop_old_partitions()`, `SELECT penstock.make_partition('` + parent + `', 7)`,
		} {
			for changed := 1; changed > 0; turned += changed {
				if err := d.pool.QueryRow(ctx, sql).Scan(&changed); err != nil {
					return turned, err
				}
			}
		}
	}
	return turned, nil
}

// soon executes a statement that waits for locks as long as the product's maintenance does.
func (d *database) soon(ctx context.Context, sql string) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '200ms'`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql)
		return err
	})
}
