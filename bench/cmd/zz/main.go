package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/penstock/penstock/bench/peers"
	"github.com/penstock/penstock/internal/devpostgres"
)

func main() {
	ctx := context.Background()
	s, err := devpostgres.Start(ctx, devpostgres.Config{Settings: map[string]string{"shared_preload_libraries": "pg_stat_statements", "shared_buffers": "1GB", "max_wal_size": "16GB", "pg_stat_statements.track": "top", "track_io_timing": "on"}})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Stop(ctx)
	c, err := pgx.Connect(ctx, s.ConnString())
	if err != nil {
		log.Fatal(err)
	}
	c.Exec(ctx, "create extension pg_stat_statements")
	p := &peers.Penstock{}
	if err := p.Setup(ctx, s.ConnString(), peers.Payload{}); err != nil {
		log.Fatal(err)
	}
	switch os.Args[1] {
	case "sustained":
		w, err := p.Sustained(ctx, 8*time.Second)
		fmt.Println(float64(w.Entries)/w.Seconds, w.Entries, err)
	case "groups":
		w, err := p.BulkPush(ctx, 200000, 50)
		fmt.Println("push", float64(w.Entries)/w.Seconds, err)
		w, err = p.DrainGroups(ctx, 200000, 50)
		fmt.Println("drain", float64(w.Entries)/w.Seconds, err)
	case "solo":
		w, err := p.BulkPush(ctx, 200000, 1)
		fmt.Println("push", float64(w.Entries)/w.Seconds, err)
		w, err = p.DrainSolo(ctx, 200000)
		fmt.Println("drain", float64(w.Entries)/w.Seconds, err)
	}
	rows, _ := c.Query(ctx, `select calls, rows, total_exec_time, mean_exec_time, total_plan_time, shared_blks_hit, wal_bytes::float8, left(regexp_replace(query, '\s+', ' ', 'g'), 60) from pg_stat_statements order by total_exec_time desc limit 16`)
	for rows.Next() {
		v, _ := rows.Values()
		fmt.Println(v...)
	}
}
