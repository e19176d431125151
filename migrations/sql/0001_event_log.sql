-- The event log, the way into it, and the cursors of those who read it.
--
-- This file may be copied into a migration tool of your own, under any number. The library itself
-- renders it for other names (schema, log name, channel) and keeps what it applied in event_migrations.

-- The counter: one row. Whoever holds it may number events, until the end of its transaction; so what
-- is rolled back leaves no hole, and who sees a number sees every smaller one.
create table public.event_seq (
    one      boolean primary key default true check (one),
    last_seq bigint  not null default 0 check (last_seq >= 0)
) with (fillfactor = 10);

insert into public.event_seq default values;

-- A consumer may not append to the log that it reads: its own unit would wait for the counter and hold it
-- until its round ends. The round says by a setting which log it reads. One that may stage adds a word to it: what it does
-- not stage is refused when it is numbered. Mine is the log of the relation, where the relation's name does not tell.
create function public.event_refuse_consumer(reads text, relation oid, mine text, staging boolean) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp
as $function$
declare
    log constant text := coalesce(mine, (
        select n.nspname || '.' || regexp_replace(c.relname, '_[a-z]+$', '')
        from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = relation));
begin
    if reads = log or staging and reads = log || ' staged' then
        raise exception 'a consumer may not append to the log that it reads (%)', relation::regclass
            using errcode = 'EL001',
                  hint = 'publish a job from the handler, and append to the log in the handler of the job';
    end if;
end
$function$;

-- What may be appended: an event that consumers can read, and not by whoever is just consuming the log. Otherwise the append
-- fails and says why. One function costs an append less than a check for each column and a trigger, which the server parses
-- and plans anew with every insert. It runs with the search_path of whoever appends, so all that it uses is qualified.
create function public.event_outbox_check(
    outbox oid, occurred_at timestamptz, topic text, uuid text, once boolean, metadata jsonb) returns boolean
language plpgsql stable
as $function$
declare
    reads  pg_catalog.text;
    reason pg_catalog.text;
begin
    -- Mostly all is well, which one expression tells: the server prepares each anew in every transaction.
    if coalesce(pg_catalog.current_setting('eventlog.log', true), '') operator(pg_catalog.=) ''
        and pg_catalog.isfinite(occurred_at)
        and topic operator(pg_catalog.<>) '' and topic operator(pg_catalog.<>) '*'
        and not (once and pg_catalog.octet_length(uuid) operator(pg_catalog.>) 2000)
        and pg_catalog.jsonb_typeof(metadata) operator(pg_catalog.=) 'object'
        and not metadata operator(pg_catalog.@?) 'strict $.* ? (@.type() <> "string")'
    then
        return true;
    end if;
    reads := pg_catalog.current_setting('eventlog.log', true);
    if reads operator(pg_catalog.<>) '' then
        perform public.event_refuse_consumer(reads, outbox, null, false);
    end if;
    reason := case
        when not pg_catalog.isfinite(occurred_at) then 'its occurred_at is infinite'
        when topic operator(pg_catalog.=) '' then 'its topic is empty'
        when topic operator(pg_catalog.=) '*' then 'its topic is what consumers of all topics subscribe to'
        when once and pg_catalog.octet_length(uuid) operator(pg_catalog.>) 2000 then 'its uuid is longer than 2000 bytes, and once keeps no more'
        when pg_catalog.jsonb_typeof(metadata) operator(pg_catalog.<>) 'object'
            or metadata operator(pg_catalog.@?) 'strict $.* ? (@.type() <> "string")' then 'its metadata is not an object of strings'
    end;
    if reason is not null then
        raise exception 'an event cannot be appended: %', reason using errcode = 'check_violation', constraint = 'outbox_check';
    end if;
    return true;
end
$function$;

grant execute on function public.event_refuse_consumer(text, oid, text, boolean) to public;
grant execute on function public.event_outbox_check(oid, timestamptz, text, text, boolean, jsonb) to public;

-- Where events are appended: one insert in the transaction of the work that they tell of. At COMMIT a deferred
-- trigger numbers them and moves them to the log. What is staged is left here, for a sequencer to number later.
create table public.event_outbox (
    xid         xid8        not null default pg_current_xact_id(),
    id          bigint      generated always as identity,
    occurred_at timestamptz not null default clock_timestamp(),
    topic       text        not null,
    key         text,
    uuid        text        not null default gen_random_uuid()::text,
    payload     bytea       not null default '',
    metadata    jsonb       not null default '{}', -- an object of strings, as consumers read nothing else
    staged      boolean     not null default false, -- numbered later, so that its transaction waits for no other
    once        boolean     not null default false, -- a second append of the same uuid is a no-op
    appended_at timestamptz not null default clock_timestamp(), -- on the database's clock
    primary key (xid, id),
    check (public.event_outbox_check(tableoid, occurred_at, topic, uuid, once, metadata))
);

-- Stable over versions, platforms and collations: the first 32 bits of the key's SHA-256.
create function public.event_key_hash(key text) returns bigint
language sql immutable strict parallel safe
return ('x' || left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 8))::bit(32)::bigint;

-- the log's own table: begin
create table public.event_log (
    seq         bigint      not null check (seq > 0),
    occurred_at timestamptz not null check (isfinite(occurred_at)), -- the source's clock
    recorded_at timestamptz not null, -- the database's clock, when the event was numbered
    topic       text        not null,
    key         text,
    key_hash    bigint,               -- public.event_key_hash(key): 0 to 2^32-1
    uuid        text        not null,
    payload     bytea       not null,
    metadata    jsonb       not null,
    primary key (seq)
) partition by range (seq);

create table public.event_log_first partition of public.event_log for values from (minvalue) to (maxvalue);
-- the log's own table: end

-- The ids of events that were appended once, as long as the event is retained.
create table public.event_ids (
    id        text   primary key,
    outbox_id bigint not null, -- the row that was the first with this id
    seq       bigint           -- the number that it got
);

-- Numbers rows of the outbox and moves them to the log; single tells whether one of them is to be there once. Only functions
-- of the log call it, which force generic plans: a list of rows would be planned anew each time.
create function public.event_outbox_move(candidates tid[], outbox oid, single boolean) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $function$
declare
    base   bigint;
    moment timestamptz;
    moved  bigint;
begin
    if single then
        loop
            -- Before the counter, and in order: two that append the same ids wait for each other here, in one direction.
            insert into public.event_ids (id, outbox_id)
            select distinct on (o.uuid) o.uuid, o.id from public.event_outbox o
            where o.ctid = any (candidates) and o.once order by o.uuid, o.id
            on conflict (id) do nothing;
            delete from public.event_outbox o using public.event_ids i
            where o.ctid = any (candidates) and o.once and i.id = o.uuid and i.outbox_id <> o.id;
            candidates := array(select o.ctid from public.event_outbox o where o.ctid = any (candidates));
            -- An id may be forgotten with its event between the two.
            exit when not exists (
                select from public.event_outbox o where o.ctid = any (candidates) and o.once
                    and not exists (select from public.event_ids i where i.id = o.uuid));
        end loop;
        if cardinality(candidates) = 0 then
            return 0;
        end if;
    end if;

    -- Waiters queue here and not on the counter's row: with many writers that is much faster. The key is
    -- the outbox's oid below a constant of our own.
    perform pg_advisory_xact_lock((1702259815::bigint << 32) + outbox::bigint);
    update public.event_seq s set last_seq = s.last_seq + cardinality(candidates)
    returning s.last_seq - cardinality(candidates), clock_timestamp() into strict base, moment;
    if single then
        update public.event_ids i set seq = n.seq
        from (
            select o.id, o.uuid, o.once, base + row_number() over (order by o.id) as seq
            from public.event_outbox o where o.ctid = any (candidates)
        ) n
        where n.once and i.id = n.uuid and i.outbox_id = n.id;
    end if;
    with taken as (
        delete from public.event_outbox o where o.ctid = any (candidates)
        returning o.id, o.occurred_at, o.topic, o.key, o.uuid, o.payload, o.metadata
    )
    insert into public.event_log (seq, occurred_at, recorded_at, topic, key, key_hash, uuid, payload, metadata)
    select base + row_number() over (order by t.id), t.occurred_at, moment,
           t.topic, t.key, public.event_key_hash(t.key), t.uuid, t.payload, t.metadata
    from taken t;
    get diagnostics moved = row_count;
    if moved <> cardinality(candidates) then
        raise exception 'the log took % of % events: a trigger or rule of its table keeps the others out', moved, cardinality(candidates)
            using errcode = 'integrity_constraint_violation';
    end if;

    perform pg_notify('event_log', '');
    return moved;
end
$function$;

create function public.event_outbox_number() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
-- The outbox is empty whenever it is analyzed; a plan made for that would read all its dead rows. (What such a
-- setting adds to the estimates must not start the compiler.)
set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
as $function$
declare
    mine       constant xid8 := pg_current_xact_id();
    candidates tid[];
    single     boolean;
begin
    if new.xid <> mine then
        raise exception 'an outbox row names transaction %, but was written by %', new.xid, mine
            using errcode = 'integrity_constraint_violation',
                  hint = 'leave column xid to its default';
    end if;
    -- The trigger of the first row numbers all rows of its transaction; the others find theirs gone.
    if exists (select from public.event_outbox o where o.xid = mine and o.id = new.id) then
        select array_agg(o.ctid), bool_or(o.once) into candidates, single
        from public.event_outbox o where o.xid = mine and not o.staged;
        perform public.event_outbox_move(candidates, tg_relid, single);
    end if;
    return null;
end
$function$;

create constraint trigger event_outbox_number after insert on public.event_outbox
    deferrable initially deferred
    for each row when (not new.staged) execute function public.event_outbox_number();

-- Numbers what was staged and has been committed, at most so many events, in the order in which they were staged. It
-- looks only at what an earlier snapshot did not show, so that it does not read its own dead rows again: of the
-- transactions that were finished then nothing can come any more. Null looks at everything.
--
-- Where there were more, the next call goes on behind the last row, and up to what the first call saw: of two
-- transactions of which one began after the other's end, the later one would otherwise come first.
--
-- One at a time: while another one is at it, no row is returned. Where there is nothing to do nothing is locked. Missed are
-- events that are still to be numbered, refused those that the log does not take.
create table public.event_sequencer (
    one boolean primary key default true check (one)
);

insert into public.event_sequencer default values;

create function public.event_outbox_sequence(since pg_snapshot, until pg_snapshot, behind_xid xid8, behind_id bigint, most integer)
returns table (seen pg_snapshot, taken integer, last_xid xid8, last_id bigint, numbered bigint, missed integer, refused integer, reason text)
language plpgsql security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
as $function$
declare
    known      constant boolean := pg_snapshot_xmax(since) <= pg_snapshot_xmax(pg_current_snapshot()); -- not that of another server
    finished   constant xid8 := case when known then pg_snapshot_xmax(since) else '0' end;
    running    constant xid8[] := case when known then array(select pg_snapshot_xip(since)) else '{}' end;
    candidates tid[];
    free       tid[];
    xids       xid8[];
    ids        bigint[];
    one        tid;
    single     boolean;
    outbox     oid;
    violated   text;
begin
    for attempt in 1 .. 2 loop
        -- The arrays are in the subselect's order: an aggregate's own would sort once more for each.
        select coalesce(until, pg_current_snapshot()), coalesce(array_agg(t.ctid), '{}'), coalesce(array_agg(t.xid), '{}'),
            coalesce(array_agg(t.id), '{}')
        into seen, candidates, xids, ids
        from (
            (select o.ctid, o.xid, o.id from public.event_outbox o
            where o.staged and o.xid = any (running) and (until is null or pg_visible_in_snapshot(o.xid, until))
                and (o.xid, o.id) > (behind_xid, behind_id)
            order by o.xid, o.id limit most)
            union all
            (select o.ctid, o.xid, o.id from public.event_outbox o
            where o.staged and o.xid >= finished and (until is null or pg_visible_in_snapshot(o.xid, until))
                and (o.xid, o.id) > (behind_xid, behind_id)
            order by o.xid, o.id limit most)
            order by xid, id limit most
        ) t;
        taken := cardinality(candidates);
        exit when taken = 0 or attempt = 2;
        -- What another one is moving is looked at again once the lock is held.
        perform from public.event_sequencer q for update skip locked;
        if not found then
            return;
        end if;
    end loop;
    last_xid := xids[taken];
    last_id := ids[taken];
    numbered := 0;
    missed := 0;
    refused := 0;
    if taken > 0 then
        -- What somebody else has locked or changed is left to another pass, and holds up nobody.
        select coalesce(array_agg(f.ctid), '{}'), bool_or(f.once), min(f.tableoid) into free, single, outbox
        from (
            select o.ctid, o.once, o.tableoid from public.event_outbox o where o.ctid = any (candidates) for update skip locked
        ) f;
        missed := taken - cardinality(free);
        begin
            if cardinality(free) > 0 then
                numbered := public.event_outbox_move(free, outbox, single);
            end if;
        exception when data_exception or integrity_constraint_violation or program_limit_exceeded then
            -- One that the log does not take must not hold up the others.
            for one in select o.ctid from public.event_outbox o where o.ctid = any (free) order by o.id loop
                begin
                    numbered := numbered + public.event_outbox_move(array[one], outbox, single);
                exception when data_exception or integrity_constraint_violation or program_limit_exceeded then
                    get stacked diagnostics violated = constraint_name, reason = message_text;
                    refused := refused + 1;
                    if sqlstate = '23514' and violated = '' then -- the partitions are full: the others wait for new ones
                        missed := missed + 1;
                        exit;
                    end if;
                end;
            end loop;
        end;
    end if;
    return next;
end
$function$;

-- They run with their owner's rights.
revoke execute on function public.event_outbox_move(tid[], oid, boolean) from public;
revoke execute on function public.event_outbox_number() from public;
revoke execute on function public.event_outbox_sequence(pg_snapshot, pg_snapshot, xid8, bigint, integer) from public;

-- Nor may it write to the log itself.
create function public.event_refuse_append() returns trigger
language plpgsql
as $function$
begin
    perform public.event_refuse_consumer(current_setting('eventlog.log', true), tg_relid, tg_argv[0], true);
    return null;
end
$function$;

-- the log's own trigger: begin
create trigger event_refuse_append before insert on public.event_log
    for each statement when (current_setting('eventlog.log', true) <> '') execute function public.event_refuse_append();
-- the log's own trigger: end

-- A cursor: how far one consumer has got with one topic ('' = all topics) of one shard ('' = unsharded).
create table public.event_consumer_cursors (
    consumer         text        not null,
    topic            text        not null default '',
    shard            text        not null default '',
    last_seq         bigint      not null default 0, -- the last event passed
    last_occurred_at timestamptz,                    -- when that event occurred, on the source's clock
    occurred_seq     bigint,                         -- the event that last_occurred_at is of
    matched_seq      bigint,                         -- the last event that was this consumer's own
    matched_at       timestamptz,                    -- when it was passed
    moved_at         timestamptz,                    -- when last_seq last changed
    moved_by         text,                           -- the instance that changed it
    rounds           bigint      not null default 0, -- committed so far
    paused_at        timestamptz,                    -- no round begins until it is resumed
    retired_at       timestamptz,                    -- nobody needs it any more: no round begins, nothing is kept for it
    created_at       timestamptz not null default clock_timestamp(),
    primary key (consumer, topic, shard)
) with (fillfactor = 50);

-- The standing failure of a cursor: written after the round was rolled back, read under the cursor's
-- lock by whoever goes next, deleted by the unit that passes it.
create table public.event_consumer_failures (
    consumer   text        not null,
    topic      text        not null,
    shard      text        not null,
    seq        bigint,               -- the event in hand or the missing number; null when not known
    through    bigint      not null, -- what has to be passed for the failure to be over
    batch      integer,              -- without a seq: how many events the next round may hand out
    since      timestamptz not null,
    failed_at  timestamptz not null,
    retry_at   timestamptz not null, -- no attempt before
    attempts   integer     not null,
    error_type text        not null,
    permanent  boolean     not null, -- another attempt is of no use
    failed_by  text        not null,
    edge       boolean     not null, -- the last write changed seq or error_type (or was the first)
    primary key (consumer, topic, shard)
) with (fillfactor = 50);

-- Rounds of consumers that park: a mark is written when a round begins and deleted when it ends, whichever way.
-- One that is left tells of a process that died in it; the next round then takes one event at a time and marks
-- each, so that an event that kills its process is found.
create table public.event_consumer_marks (
    consumer  text        not null,
    topic     text        not null,
    shard     text        not null,
    marked_by text        not null,
    marked_at timestamptz not null,
    through   bigint      not null, -- where the round that died would have ended
    slow      boolean     not null, -- one event at a time, until through is passed
    seq       bigint,               -- slow: the event in hand
    deaths    integer     not null, -- slow: how often a process has died with it in hand, if this one does
    primary key (consumer, topic, shard)
) with (fillfactor = 50);

-- Events that a consumer has passed without handling them, because they kept failing. The copy outlives the log's.
create table public.event_consumer_parked (
    consumer     text        not null,
    topic        text        not null,
    shard        text        not null,
    seq          bigint      not null,
    occurred_at  timestamptz not null,
    recorded_at  timestamptz not null,
    event_topic  text        not null,
    key          text,
    uuid         text        not null,
    payload      bytea       not null,
    metadata     jsonb       not null,
    error_type   text        not null,
    attempts     integer     not null, -- replays included
    parked_at    timestamptz not null default clock_timestamp(),
    parked_by    text        not null,
    replay_at    timestamptz,          -- a replay was asked for
    replay_by    text,
    primary key (consumer, topic, shard, seq)
);

create index event_consumer_parked_replay on public.event_consumer_parked (consumer, topic, shard, seq)
    where replay_at is not null;

-- Events that a consumer was moved past by the library itself, unhandled: they had been removed before it came
-- to them, or were older than its resume age. A row stays until an operator settles it.
create table public.event_consumer_losses (
    consumer    text        not null,
    topic       text        not null,
    shard       text        not null,
    first_seq   bigint      not null,
    last_seq    bigint      not null,
    reason      text        not null, -- 'retention' or 'resume_age'
    recorded_at timestamptz not null default clock_timestamp(),
    recorded_by text        not null,
    settled_at  timestamptz,
    settled_by  text,
    primary key (consumer, topic, shard, first_seq),
    check (last_seq >= first_seq)
);

-- What rounds have committed: one row a round, written in its unit, so it is there if and only if the effects, the
-- jobs and the cursor's move are. The rows of a cursor are a ring: the oldest is written over.
create table public.event_consumer_rounds (
    consumer     text        not null,
    topic        text        not null,
    shard        text        not null,
    slot         integer     not null,
    round        text        not null, -- the round's id, which begins with its instance
    first_seq    bigint      not null,
    last_seq     bigint      not null,
    handled      integer     not null, -- events handed out; the others were not the consumer's own
    committed_at timestamptz not null, -- a moment before the COMMIT
    committed_by text        not null, -- the instance
    primary key (consumer, topic, shard, slot)
) with (fillfactor = 50);

-- How long events are kept, and how the log is partitioned for that. One row, that every process may check its own
-- settings against.
create table public.event_retention (
    one            boolean     primary key default true check (one),
    keep           interval    not null default '30 days' check (keep > interval '0'),
    switched_on    boolean     not null default false, -- whether anything is removed
    partition_size bigint      not null default 1000000 check (partition_size > 0),
    pinned_age     interval    check (pinned_age >= keep), -- how old what is kept for a late consumer may become
    pinned_bytes   bigint      check (pinned_bytes > 0),   -- how much of it may be kept
    set_at         timestamptz, -- when these were set
    maintained_at  timestamptz, -- when the last maintenance ended
    maintained_by  text,
    error          text,        -- what it failed with
    failing_since  timestamptz
);

insert into public.event_retention default values;

-- Partitions that retention has removed, or is removing: decided on, detached, dropped.
create table public.event_retention_removals (
    name       text        primary key,
    first_seq  bigint      not null,
    last_seq   bigint      not null,
    newest_at  timestamptz,          -- when its newest event was recorded
    behind     text[]      not null, -- consumers that had not passed it, when a cap let it go
    decided_at timestamptz not null default clock_timestamp(),
    removed_at timestamptz,          -- null: what is left of it goes with the next maintenance
    removed_by text        not null
);

-- Every change of a cursor that was not a round: its creation, and what operators did.
create table public.event_consumer_interventions (
    id       bigint      generated always as identity primary key,
    at       timestamptz not null default clock_timestamp(),
    consumer text        not null,
    topic    text        not null,
    shard    text        not null,
    action   text        not null,
    from_seq bigint,
    to_seq   bigint,
    by       text        not null,
    reason   text        not null default ''
);

create index event_consumer_interventions_cursor
    on public.event_consumer_interventions (consumer, topic, shard, action);
