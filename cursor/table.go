package cursor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// NoColumn says that an existing table has no such column.
const NoColumn = "-"

// TableConfig makes an existing table the log. What the library reads as its log is then a view over that table, with the
// log's name; the migrations make it, and append to the table through it. The table stays its owner's: it is not
// partitioned, and nothing of it is removed.
//
// The numbers of the table must be gapless: they come from the log's counter alone. A table whose numbers come from a
// sequence is refused by the migration.
type TableConfig struct {
	// Schema and Name are the table's. Schema defaults to "public".
	Schema, Name string

	// The columns. An empty name is that of the field in snake case (occurred_at). Seq is a bigint, unique, not null and
	// without a default; OccurredAt and RecordedAt are timestamptz and not null; Topic, Key and UUID are text or
	// varchar; Topic and Payload are not null. Triggers on the table run with the search_path pg_catalog: they have to
	// qualify what they name. Those from RecordedAt on may be [NoColumn]: then an event is recorded when it occurred, has no key, its
	// number as UUID, and no metadata. Package publisher refuses a key and metadata for which there is no column.
	Seq, OccurredAt, Topic, Payload string
	RecordedAt, Key, UUID, Metadata string

	// PayloadType is the payload column's: bytea, json, jsonb or text. Only in a bytea can a payload be anything; what
	// is not JSON, or not valid text, is refused when it is appended by package publisher, and fails the appending
	// transaction otherwise. A jsonb keeps the value and not the bytes. Defaults to bytea.
	PayloadType string

	// MetadataType is the metadata column's: json or jsonb. Null is read as no metadata. Defaults to jsonb.
	MetadataType string

	// UUIDType is the UUID column's: text (or varchar) or uuid. Defaults to text.
	UUIDType string
}

// table is a checked TableConfig.
type table struct {
	TableConfig
	name string // qualified and quoted
}

func newTable(c TableConfig) (*table, error) {
	setDefault := func(value *string, to string) {
		if *value == "" {
			*value = to
		}
	}
	setDefault(&c.Schema, "public")
	errs := []error{checkName("Table.Schema", c.Schema, maxIdentifier), checkName("Table.Name", c.Name, maxIdentifier)}
	if c.Name == "" {
		errs = append(errs, errors.New("missing Table.Name"))
	}
	seen := map[string]string{}
	for _, column := range []struct {
		setting  string
		value    *string
		to       string
		required bool
	}{
		{"Seq", &c.Seq, "seq", true}, {"OccurredAt", &c.OccurredAt, "occurred_at", true}, {"Topic", &c.Topic, "topic", true},
		{"Payload", &c.Payload, "payload", true}, {"RecordedAt", &c.RecordedAt, "recorded_at", false}, {"Key", &c.Key, "key", false},
		{"UUID", &c.UUID, "uuid", false}, {"Metadata", &c.Metadata, "metadata", false},
	} {
		setDefault(column.value, column.to)
		if *column.value == NoColumn {
			if column.required {
				errs = append(errs, fmt.Errorf("column Table.%s is one that a log needs", column.setting))
			}
			continue
		}
		errs = append(errs, checkName("Table."+column.setting, *column.value, maxIdentifier))
		if other := seen[*column.value]; other != "" {
			errs = append(errs, fmt.Errorf("columns Table.%s and Table.%s are the same (%q)", other, column.setting, *column.value))
		}
		seen[*column.value] = column.setting
	}
	for _, of := range []struct {
		setting string
		value   *string
		types   []string // the first is the default
	}{
		{"PayloadType", &c.PayloadType, []string{"bytea", "json", "jsonb", "text"}},
		{"MetadataType", &c.MetadataType, []string{"jsonb", "json"}},
		{"UUIDType", &c.UUIDType, []string{"text", "uuid"}},
	} {
		setDefault(of.value, of.types[0])
		if !slices.Contains(of.types, *of.value) {
			errs = append(errs, fmt.Errorf("type Table.%s %q is none of %s", of.setting, *of.value, strings.Join(of.types, ", ")))
		}
	}
	return &table{c, pgx.Identifier{c.Schema, c.Name}.Sanitize()}, errors.Join(errs...)
}

func (t *table) column(name string) string { return "t." + pgx.Identifier{name}.Sanitize() }

// Existing returns the configuration of the existing table that is the log, with its defaults, if it is one.
func (l *Log) Existing() (config TableConfig, existing bool) {
	if t := l.orDefault().table; t != nil {
		return t.TableConfig, true
	}
	return TableConfig{}, false
}

// The migration has checked more; this is what somebody may have changed since.
const sqlCheckTable = `
select s.last_seq, coalesce((select max(l.seq) from public.event_log l), 0), coalesce((
    select a.atthasdef or a.attidentity <> '' from pg_attribute a
    where a.attrelid = to_regclass($1) and a.attname = $2 and not a.attisdropped), true)
from public.event_seq s`

// ErrLogTable is returned when an existing table is not fit to be the log any more.
var ErrLogTable = errors.New("the table is not fit to be the log")

// checkTable looks whether an existing table is still what the migration has found.
func (l *Log) checkTable(ctx context.Context, tx pgx.Tx) error {
	t := l.orDefault().table
	if t == nil {
		return nil
	}
	var counter, highest int64
	var numbered bool
	if err := tx.QueryRow(ctx, l.Render(sqlCheckTable), t.name, t.Seq).Scan(&counter, &highest, &numbered); err != nil {
		return err
	}
	switch {
	case numbered:
		return fmt.Errorf("%w: column %q of %s has a default, or is gone: the log's numbers come from its counter alone; drop the default", ErrLogTable, t.Seq, t.name)
	case highest > counter || highest < counter && highest > 0:
		return fmt.Errorf("%w: the highest number of %s is %d, and the counter %s is at %d: somebody has written one without the other; "+
			"make the counter what the highest number is, once nobody appends", ErrLogTable, t.name, highest, l.Table("seq"), counter)
	}
	return nil
}

// ExistingTable is what stands in the migrations for the table of the log, where that is an existing one, and for the
// table's trigger.
func (l *Log) ExistingTable() (tableSQL, triggerSQL string) {
	t := l.table
	asText := func(column string) string { return t.column(column) + "::text" }
	or := func(column, otherwise string, expression func(string) string) string {
		if column == NoColumn {
			return otherwise
		}
		return expression(column)
	}
	payload := t.column(t.Payload)
	if t.PayloadType != "bytea" {
		payload = "convert_to(" + asText(t.Payload) + ", 'UTF8')"
	}
	key := or(t.Key, "null::text", asText)
	// What the view shows, in the order of the log's own columns.
	shown := []string{
		t.column(t.Seq),
		t.column(t.OccurredAt),
		or(t.RecordedAt, t.column(t.OccurredAt), t.column),
		asText(t.Topic),
		key,
		l.Render("public.event_key_hash(") + key + ")",
		or(t.UUID, t.column(t.Seq)+"::text", asText),
		payload,
		or(t.Metadata, "'{}'::jsonb", func(c string) string { return "coalesce(nullif(" + t.column(c) + "::jsonb, 'null'), '{}')" }),
	}
	const columns = "seq, occurred_at, recorded_at, topic, key, key_hash, uuid, payload, metadata"
	var list []string
	for i, name := range strings.Split(columns, ", ") {
		list = append(list, shown[i]+" as "+name)
	}
	newPayload := "new.payload"
	if t.PayloadType != "bytea" {
		newPayload = "convert_from(new.payload, 'UTF8')"
		if t.PayloadType != "text" {
			newPayload += "::" + t.PayloadType
		}
	}
	into := [][2]string{{t.Seq, "new.seq"}, {t.OccurredAt, "new.occurred_at"}, {t.Topic, "new.topic"}, {t.Payload, newPayload}}
	for _, optional := range [][2]string{
		{t.RecordedAt, "new.recorded_at"}, {t.Key, "new.key"}, {t.UUID, "new.uuid::" + t.UUIDType}, {t.Metadata, "new.metadata::" + t.MetadataType},
	} {
		if optional[0] != NoColumn {
			into = append(into, optional)
		}
	}
	var names, values []string
	for _, c := range into {
		names, values = append(names, pgx.Identifier{c[0]}.Sanitize()), append(values, c[1])
	}
	redacted := []string{pgx.Identifier{t.Payload}.Sanitize() + " = " + newPayload}
	if t.Metadata != NoColumn {
		redacted = append(redacted, pgx.Identifier{t.Metadata}.Sanitize()+" = new.metadata::"+t.MetadataType)
	}
	view, literal := l.Table("log"), func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

	// In the functions' bodies % stands for a value: the names go in as parameters of format.
	tableSQL = fmt.Sprintf(`
do $existing$
declare
    of constant regclass := to_regclass(%[1]s);
    col   record;
begin
    if of is null then
        raise exception 'the table %% that is to be the log does not exist', %[1]s using errcode = 'undefined_table';
    end if;
    select a.attname, a.attnotnull, format_type(a.atttypid, -1) as type, a.atthasdef or a.attidentity <> '' as numbered,
        exists (
            select from pg_index i where i.indrelid = of and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
                and i.indnkeyatts = 1 and i.indkey[0] = a.attnum) as single
    into col
    from pg_attribute a where a.attrelid = of and a.attname = %[2]s and a.attnum > 0 and not a.attisdropped;
    if not found then
        raise exception 'the log %% has no column %%: name it by Table.Seq', of, %[2]s using errcode = 'undefined_column';
    elsif col.numbered then
        raise exception 'the numbers of the log %% come from a sequence (column %%): they have gaps where transactions were rolled back, and are seen in another order than they were given', of, col.attname
            using errcode = 'invalid_table_definition', hint = 'renumber the events without a gap, keep the old number in a column of its own, and drop the default or identity';
    elsif col.type <> 'bigint' or not col.attnotnull or not col.single then
        raise exception 'the numbers of the log %% (column %%) must be of type bigint, not null and unique by an index of their own', of, col.attname
            using errcode = 'invalid_table_definition';
    end if;
    if exists (select from pg_inherits i join pg_class c on c.oid = i.inhparent where c.oid = of and c.relkind <> 'p') then
        raise exception 'the log %% has tables that inherit from it, whose numbers nothing keeps apart', of
            using errcode = 'invalid_table_definition';
    end if;
    for col in
        select a.attname from pg_attribute a where a.attrelid = of and a.attname in (%[15]s) and not a.attnotnull
    loop
        raise exception 'column %% of the log %% may be null', col.attname, of
            using errcode = 'invalid_table_definition', hint = 'give the rows that have none a value, and set it not null';
    end loop;
    for col in
        select a.attname, format_type(a.atttypid, -1) as type from pg_attribute a
        where a.attrelid = of and a.attname in (%[14]s) and (a.atttypid <> 'timestamptz'::regtype or not a.attnotnull)
    loop
        raise exception 'column %% of the log %% is not a timestamptz that is not null, but of type %%', col.attname, of, col.type
            using errcode = 'invalid_table_definition', hint = 'alter the column: using ... at time zone says which zone its times were of';
    end loop;
end
$existing$;

create view %[3]s as select
    %[4]s
from %[5]s t;

-- The counter goes on where the table ends.
lock table %[5]s in share row exclusive mode;
do $existing$
declare
    rows    bigint;
    lowest  bigint;
    highest bigint;
begin
    select count(*), min(l.seq), max(l.seq) into rows, lowest, highest from %[3]s l;
    if rows > 0 and (rows <> highest - lowest + 1 or lowest < 1) then
        raise exception 'the numbers of the log %% are not gapless: %% rows from %% to %%', %[1]s, rows, lowest, highest
            using errcode = 'invalid_table_definition', hint = 'renumber the events without a gap, from 1 on, and keep the old number in a column of its own';
    end if;
    update %[6]s s set last_seq = coalesce(highest, 0);
end
$existing$;

create rule %[7]s as on insert to %[3]s do instead
insert into %[5]s as t (%[8]s)
values (%[9]s)
returning %[10]s;

-- What an operator redacts.
create rule %[11]s as on update to %[3]s do instead
update %[5]s t set %[12]s where %[13]s = old.seq
returning %[10]s;
`,
		literal(t.name), literal(t.Seq), view, strings.Join(list, ",\n    "), t.name, l.Table("seq"),
		pgx.Identifier{l.name + "_log_append"}.Sanitize(), strings.Join(names, ", "), strings.Join(values, ", "), strings.Join(shown, ", "),
		pgx.Identifier{l.name + "_log_redact"}.Sanitize(), strings.Join(redacted, ", "), t.column(t.Seq),
		literal(t.OccurredAt)+", "+literal(t.RecordedAt), literal(t.Topic)+", "+literal(t.Payload))
	triggerSQL = fmt.Sprintf(`
create trigger %s before insert on %s
    for each statement when (current_setting('eventlog.log', true) <> '') execute function %s(%s);
`, pgx.Identifier{l.name + "_refuse_append"}.Sanitize(), t.name, l.Table("refuse_append"), literal(l.Schema()+"."+l.Name()))
	return tableSQL, triggerSQL
}
