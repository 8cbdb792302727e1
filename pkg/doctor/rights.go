package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
)

const sessionRoleSQL = `
SELECT current_user, coalesce((SELECT duty FROM penstock.database_role WHERE role = current_user), ''),
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
       pg_has_role(n.nspowner, 'USAGE'), pg_has_role('pg_read_all_stats', 'USAGE')
  FROM pg_namespace n WHERE n.nspname = 'penstock'`

// Rights of PUBLIC, missing and surplus rights of roles with a duty, roles with a duty that are above it, roles with a
// duty of $1 that do not see other sessions, and objects that the owner of the schema could not replace: recorded ones
// and partitions. What was made by hand in the schema may belong to anybody.
const rightsSQL = `
SELECT format('PUBLIC may %s %s: REVOKE %s ON %s %s FROM PUBLIC', d.privilege, d.object, d.privilege, d.kind, d.object)
  FROM penstock.held_rights(NULL) d
UNION ALL
SELECT format('%s lacks %s on %s, which %s needs', r.role, d.privilege, d.object, r.duty)
  FROM penstock.database_role r
 CROSS JOIN LATERAL penstock.duty_differences(r.duty, to_regrole(format('%I', r.role))) d
 WHERE to_regrole(format('%I', r.role)) IS NOT NULL AND d.wanted
UNION ALL
SELECT format('%s has %s on %s, which %s does not need', r.role, d.privilege, d.object, r.duty)
  FROM penstock.database_role r
 CROSS JOIN LATERAL penstock.duty_differences(r.duty, to_regrole(format('%I', r.role))) d
 WHERE to_regrole(format('%I', r.role)) IS NOT NULL AND NOT d.wanted
UNION ALL
SELECT format('%s has the duty %s and is %s', r.role, r.duty,
              CASE WHEN p.rolsuper THEN 'a superuser' ELSE 'the owner of the schema' END)
  FROM penstock.database_role r
  JOIN pg_roles p ON p.rolname = r.role
  JOIN pg_namespace n ON n.nspname = 'penstock'
 WHERE p.rolsuper OR pg_has_role(p.oid, n.nspowner, 'USAGE')
UNION ALL
SELECT format('%1$s, with the duty %2$s, sees nothing of other sessions: as a superuser, ' ||
              'GRANT pg_read_all_stats TO %1$I', r.role, r.duty)
  FROM penstock.database_role r JOIN pg_roles p ON p.rolname = r.role
 WHERE r.duty = ANY ($1) AND NOT pg_has_role(p.oid, 'pg_read_all_stats', 'USAGE')
UNION ALL
SELECT format('role %s with the duty %s is gone', r.role, r.duty)
  FROM penstock.database_role r WHERE to_regrole(format('%I', r.role)) IS NULL
UNION ALL
SELECT format('%1$s belongs to %2$s, not to the owner of the schema: ALTER %3$s %1$s OWNER TO %4$s',
              o.object, o.owner::regrole, upper(o.kind), n.nspowner::regrole)
  FROM pg_namespace n
  JOIN (SELECT relnamespace, relowner, CASE relkind WHEN 'v' THEN 'view' ELSE 'table' END, oid::regclass::text,
               relname::text, relispartition
          FROM pg_class WHERE relkind IN ('r', 'p', 'v')
         UNION ALL
        SELECT pronamespace, proowner, 'function', oid::regprocedure::text, oid::regprocedure::text, false
          FROM pg_proc) o(namespace, owner, kind, object, name, partition) ON o.namespace = n.oid
 WHERE n.nspname = 'penstock' AND o.owner <> n.nspowner
   AND (o.partition OR EXISTS (SELECT FROM penstock.schema_object s WHERE s.object = o.kind || ' ' || o.name))
ORDER BY 1`

// rightsShown is how many differences the finding lists.
const rightsShown = 12

// checkRights names the role of this session, and compares the rights of roles with those of their duties.
func checkRights(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var role, duty string
	var super, owner, sees bool
	if err := tx.QueryRow(ctx, sessionRoleSQL).Scan(&role, &duty, &super, &owner, &sees); err != nil {
		return Finding{}, fmt.Errorf("read the role of the session: %w", err)
	}
	roles, err := pgx.CollectRows(postgres.Query(ctx, tx,
		`SELECT format('%s (%s)', role, duty) FROM penstock.database_role ORDER BY duty, role`), pgx.RowTo[string])
	if err != nil {
		return Finding{}, err
	}
	differences, err := pgx.CollectRows(postgres.Query(ctx, tx, rightsSQL, migrations.DutiesThatDiagnose),
		pgx.RowTo[string])
	if err != nil {
		return Finding{}, err
	}
	f := Finding{Summary: "this session is " + role + ", " + standing(duty, super, owner)}
	if !sees {
		f.Summary += ", and sees nothing of other sessions: the checks connections and horizon see only its own role"
	}
	switch {
	case len(differences) > 0:
		f.Severity = Warning
		f.Summary = many(len(differences), "right differs", "rights differ") + " from the duties of roles; " + f.Summary
		f.Details = differences[:min(len(differences), rightsShown)]
		if more := len(differences) - rightsShown; more > 0 {
			f.Details = append(f.Details, fmt.Sprintf("and %d more", more))
		}
		f.Advice = "Run penstock grants --apply as the owner of the schema, or penstock grants to see the " +
			"statements. As a superuser, give objects of other roles to that owner, who could not replace them " +
			"in an upgrade."
	case len(roles) == 0:
		f.Summary += "; no role has a duty: penstock grants makes one for each program"
	default:
		f.Summary += "; duties: " + strings.Join(roles, ", ")
	}
	return f, nil
}

// standing says in words what a role may.
func standing(duty string, super, owner bool) string {
	switch {
	case super:
		return "a superuser"
	case owner:
		return "the owner of the schema"
	case duty != "":
		return "with the rights of " + duty
	}
	return "a role without a duty of its own"
}
