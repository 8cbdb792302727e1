package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// watchesSQL has a line for each watch whose triggers refuse all changes of their table, and for each one with a
// function of an earlier build, whose condition depends on how the server quotes names.
const watchesSQL = `
SELECT bool_or(bad.refuses), format('%s, for queue %s: %s', w.watched, q.name, string_agg(DISTINCT bad.line, ', '))
  FROM penstock.watch w
  JOIN penstock.queue q ON q.id = w.queue_id
  JOIN pg_trigger t ON t.tgrelid = w.watched AND t.tgname = 'penstock_' || w.queue_id || '_insert'
                   AND t.tgenabled <> 'D'
  JOIN pg_proc p ON p.oid = t.tgfoid
 CROSS JOIN LATERAL (
    SELECT true, format('column %I is gone', n.name)
      FROM unnest(w.columns || w.keys) n(name)
     WHERE NOT EXISTS (SELECT FROM pg_attribute a
                        WHERE a.attrelid = w.watched AND a.attname = n.name AND NOT a.attisdropped)
    UNION ALL
    SELECT true, format('column %I is of type %s', c.name, format_type(c.type, NULL))
      FROM penstock.watch_changed_types(w.watched, obj_description(p.oid, 'pg_proc')::jsonb) c
    UNION ALL
    SELECT false, format('its triggers are of an earlier build and belong to %s', p.proowner::regrole)
     WHERE strpos(p.prosrc, 'penstock.watch_column_sql(TG_RELID, a.attname) IS DISTINCT FROM') > 0
    ) bad(refuses, line)
 GROUP BY w.watched, w.queue_id, q.name ORDER BY w.watched::text, q.name`

func checkWatches(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	type watch struct {
		refuses bool
		line    string
	}
	read := func(row pgx.CollectableRow) (w watch, err error) {
		err = row.Scan(&w.refuses, &w.line)
		return w, err
	}
	watches, err := pgx.CollectRows(postgres.Query(ctx, tx, watchesSQL), read)
	if err != nil || len(watches) == 0 {
		return Finding{Summary: "no watch refuses changes of its table"}, err
	}
	f := Finding{
		Severity: Warning,
		Summary: "watched tables have triggers of an earlier build, which may refuse changes after an upgrade of " +
			"Postgres",
		Advice: "As the owner, SELECT penstock.watch(...) again with the columns that there are, or end the watch by " +
			"SELECT penstock.unwatch(TABLE).",
	}
	for _, w := range watches {
		f.Details = append(f.Details, w.line)
		if w.refuses {
			f.Severity = Critical
			f.Summary = "watches refuse changes of their tables: columns are not what was watched"
		}
	}
	return f, nil
}
