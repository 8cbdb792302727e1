// Package changelog turns changes of tables into the work that they imply.
//
// penstock.watch makes the changes of a table entries of a queue of kind change_log, in the transaction that makes the
// change: statement-level triggers with transition tables, one push for a statement. A task node runs them with a
// Handler, which asks an Impact what a change means and pushes that to other queues.
//
//	UPDATE orders ──trigger──► changes (change_log) ──Handler, Impact──► calc_fields, index, access lists
//
// # Example: calculated fields
//
// A field of an object is calculated from others. The queue of what is to be calculated is grouped by target object, so
// that one node calculates an object at a time, and mergeable, so that many changes of an object become one entry:
//
//	SELECT penstock.create_queue('changes', '{"kind": "change_log", "grouping": "object"}');
//	SELECT penstock.create_queue('calc_fields', '{"grouping": "target", "mergeable": true, "merge": "object"}');
//	SELECT penstock.watch('order_line', 'changes', ARRAY['order_id', 'price', 'amount']);
//
// Both queues may say in SQL what to do (penstock.set_statements): then any task node runs them. The example test of this
// package runs them by handlers in Go.
//
// # Loops
//
// A handler may write what is watched, and so push entries that push entries. What a transaction pushes is one deeper
// than the entry it works for (Descend), and past depth 16 a push is refused, by an error that names who pushes to
// whom. `ALTER DATABASE ... SET penstock.depth_max` sets another bound.
//
// # What a watch costs
//
// BenchmarkUpdate measures it. A change_log queue should have no capacity: when it is full, writers are refused.
package changelog
