package main

import (
	"context"

	"github.com/penstock/penstock/chaos/judge"
)

// readEffects reads what entries did in the database, and what the product's own check of its tables says.
func (s *site) readEffects(ctx context.Context, h *judge.History) error {
	var op int64
	var n int
	const effectsSQL = `SELECT op, count(*) FROM judge.effect GROUP BY op`
	err := s.each(ctx, effectsSQL, []any{&op, &n}, func() { h.Effects[op] = n })
	if err != nil {
		return err
	}
	err = s.each(ctx, `SELECT op FROM judge.client_row`, []any{&op}, func() { h.Rows[op] = true })
	if err != nil {
		return err
	}
	if err := s.readBatches(ctx, h); err != nil {
		return err
	}
	if err := s.readCallbacks(ctx, h); err != nil {
		return err
	}
	var invariant, detail string
	const invariantsSQL = `SELECT invariant, detail FROM penstock.check_invariants('5 seconds')`
	return s.each(
		ctx,
		invariantsSQL,
		[]any{&invariant, &detail},
		func() { h.Broken = append(h.Broken, invariant+": "+detail) },
	)
}

func (s *site) readCallbacks(ctx context.Context, h *judge.History) error {
	const sql = `SELECT entry_id, callback_id FROM penstock.callback_sent ORDER BY callback_id`
	h.Callbacks = map[int64]int64{}
	var ended, callback int64
	return s.each(ctx, sql, []any{&ended, &callback}, func() { h.Callbacks[ended] = callback })
}

func (s *site) readBatches(ctx context.Context, h *judge.History) error {
	var item judge.Item
	var n int
	const itemsSQL = `SELECT b, i, count(*) FROM judge.part GROUP BY b, i`
	err := s.each(ctx, itemsSQL, []any{&item.Label, &item.No, &n}, func() { h.Items[item] = n })
	if err != nil {
		return err
	}
	const partsSQL = `
SELECT p.batch_id, p.no, coalesce(p.outcome::text, ''), c.least, c.most
  FROM penstock.batch_part p
 CROSS JOIN LATERAL (
       SELECT coalesce(min(n), 0)::int AS least, coalesce(max(n), 0)::int AS most FROM (
              SELECT (SELECT count(*) FROM judge.part j WHERE j.b = (x->>'b')::bigint AND j.i = (x->>'i')::int) AS n
                FROM jsonb_array_elements(p.items) x) i) c`
	var part judge.BatchPart
	return s.each(ctx, partsSQL, []any{&part.Batch, &part.No, &part.Outcome, &part.Least, &part.Most},
		func() { h.BatchParts = append(h.BatchParts, part) })
}
