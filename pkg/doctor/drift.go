package doctor

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Drift compares the schema of a database with the migrations that should have made it, given in their order, and
// returns a line for each difference. It compares the text of every function, that every table, view, sequence, type,
// index and trigger that a migration makes is there, that indexes are valid, and that each queue has its table.
// Columns are not compared one by one.
func Drift(ctx context.Context, db postgres.DB, migrations []string) ([]string, error) {
	want := parse(migrations)
	var lines []string
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		have, err := catalog(ctx, tx)
		if err != nil {
			return err
		}
		functions, err := functionTexts(ctx, tx)
		if err != nil {
			return err
		}
		lines = append(missing(want.objects, have), changed(want.functions, functions)...)
		broken, err := texts(ctx, tx, brokenSQL)
		lines = append(lines, broken...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("compare the schema with the migrations: %w", err)
	}
	return lines, nil
}

// made is what migrations make.
type made struct {
	objects   map[string]string   // "table queue"; of an index and a trigger the table
	functions map[string][]string // bodies by name, oldest first
}

var (
	objectPattern   = regexp.MustCompile(`(?im)^\s*(CREATE|DROP|ALTER)\s+(?:OR REPLACE\s+)?(?:UNLOGGED\s+|UNIQUE\s+)*(TABLE|VIEW|SEQUENCE|TYPE|INDEX|TRIGGER)\s+(?:CONCURRENTLY\s+)?(?:IF (?:NOT )?EXISTS\s+)?(?:penstock\.)?"?(\w+)"?([^;]*)`)
	onPattern       = regexp.MustCompile(`(?i)\bON\s+(?:penstock\.)?"?(\w+)"?`)
	renamePattern   = regexp.MustCompile(`(?i)^[^;]*\bRENAME\s+TO\s+"?(\w+)"?`)
	functionPattern = regexp.MustCompile(`(?is)\b(CREATE|DROP|ALTER)\s+(?:OR REPLACE\s+)?FUNCTION\s+(?:IF EXISTS\s+)?penstock\.(\w+)\b`)
	bodyPattern     = regexp.MustCompile(`(?i)\bAS\s+(\$\w*\$)`)
	downPattern     = regexp.MustCompile(`(?im)^-- \+goose Down`)
	commentPattern  = regexp.MustCompile(`(?m)^\s*--.*$`)
)

// parse reads what the migrations make: bodies of functions are taken out first, for they create things of their own.
func parse(migrations []string) made {
	m := made{objects: map[string]string{}, functions: map[string][]string{}}
	for _, text := range migrations {
		if at := downPattern.FindStringIndex(text); at != nil {
			text = text[:at[0]]
		}
		rest := m.takeFunctions(text)
		rest = commentPattern.ReplaceAllString(rest, "")
		for _, found := range objectPattern.FindAllStringSubmatch(rest, -1) {
			m.take(strings.ToUpper(found[1]), strings.ToLower(found[2]), found[3], found[4])
		}
	}
	return m
}

// take notes one statement about an object: its kind, its name, and what follows.
func (m made) take(verb, kind, name, rest string) {
	object := kind + " " + name
	switch verb {
	case "CREATE":
		m.objects[object] = ""
		if on := onPattern.FindStringSubmatch(rest); on != nil && (kind == "index" || kind == "trigger") {
			m.objects[object] = on[1]
		}
	case "DROP":
		delete(m.objects, object)
		for dependent, table := range m.objects {
			if kind == "table" && table == name {
				delete(m.objects, dependent)
			}
		}
	case "ALTER":
		// RENAME TO renames the object; RENAME x TO y, which the pattern does not match, a part of it.
		if to := renamePattern.FindStringSubmatch(rest); to != nil {
			m.objects[kind+" "+to[1]] = m.objects[object]
			delete(m.objects, object)
		}
	}
}

// takeFunctions notes the functions of a migration and returns its text without their bodies.
func (m made) takeFunctions(text string) string {
	var rest strings.Builder
	for {
		found := functionPattern.FindStringSubmatchIndex(text)
		if found == nil {
			rest.WriteString(text)
			return rest.String()
		}
		rest.WriteString(text[:found[0]])
		verb, name := text[found[2]:found[3]], text[found[4]:found[5]]
		text = text[found[1]:]
		if !strings.EqualFold(verb, "CREATE") {
			if to := renamePattern.FindStringSubmatch(text); to != nil {
				m.functions[to[1]] = m.functions[name]
				delete(m.functions, name)
			} else if strings.EqualFold(verb, "DROP") {
				delete(m.functions, name)
			}
			continue
		}
		at := bodyPattern.FindStringSubmatchIndex(text)
		if at == nil {
			continue
		}
		quote := text[at[2]:at[3]]
		body, after, _ := strings.Cut(text[at[1]:], quote)
		m.functions[name] = append(m.functions[name], body)
		text = after
	}
}

const catalogSQL = `
SELECT CASE c.relkind WHEN 'v' THEN 'view' WHEN 'S' THEN 'sequence' WHEN 'i' THEN 'index' WHEN 'I' THEN 'index' ELSE 'table' END || ' ' || c.relname
  FROM pg_class c WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S', 'i', 'I')
UNION ALL
SELECT 'type ' || t.typname FROM pg_type t WHERE t.typnamespace = 'penstock'::regnamespace
UNION ALL
SELECT 'trigger ' || t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = 'penstock'::regnamespace`

func catalog(ctx context.Context, tx pgx.Tx) (map[string]bool, error) {
	names, err := texts(ctx, tx, catalogSQL)
	have := make(map[string]bool, len(names))
	for _, n := range names {
		have[n] = true
	}
	return have, err
}

func functionTexts(ctx context.Context, tx pgx.Tx) (map[string][]string, error) {
	const sql = `SELECT proname::text, prosrc FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace`
	found := map[string][]string{}
	var name, body string
	_, err := pgx.ForEachRow(postgres.Query(ctx, tx, sql), []any{&name, &body}, func() error {
		found[name] = append(found[name], body)
		return nil
	})
	return found, err
}

func missing(want map[string]string, have map[string]bool) []string {
	var lines []string
	for name := range want {
		if !have[name] {
			lines = append(lines, name+" is missing")
		}
	}
	slices.Sort(lines)
	return lines
}

// changed compares functions by name. Of a name that stands for one function, the last text counts; where it stands
// for several, each must be one of the texts.
func changed(want, have map[string][]string) []string {
	var lines []string
	for name, bodies := range want {
		allowed := bodies
		if len(have[name]) == 1 {
			allowed = bodies[len(bodies)-1:]
		}
		switch {
		case len(have[name]) == 0:
			lines = append(lines, "function "+name+" is missing")
		case slices.ContainsFunc(have[name], func(body string) bool { return !slices.Contains(allowed, body) }):
			lines = append(lines, "function "+name+" has another text than the migrations give it")
		}
	}
	for name := range have {
		if _, known := want[name]; !known && !strings.HasPrefix(name, "watch_") { // penstock.watch writes those
			lines = append(lines, "function "+name+" is not of any migration")
		}
	}
	slices.Sort(lines)
	return lines
}

// brokenSQL finds indexes that a failed CREATE INDEX CONCURRENTLY left, constraints that were never validated, and
// queues without their table.
const brokenSQL = `
SELECT 'index ' || c.relname || ' is not valid' FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE c.relnamespace = 'penstock'::regnamespace AND NOT i.indisvalid
UNION ALL
SELECT format('constraint %s of %s is not validated', conname, conrelid::regclass) FROM pg_constraint
 WHERE connamespace = 'penstock'::regnamespace AND NOT convalidated
UNION ALL
SELECT format('queue %s has no table entry_%s', q.name, q.name) FROM penstock.queue q
 WHERE NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                    WHERE i.inhparent = 'penstock.entry'::regclass AND c.relname = 'entry_' || q.name)
ORDER BY 1`
