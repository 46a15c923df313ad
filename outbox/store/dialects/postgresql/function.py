"""The SQL functions that write messages from triggers, from psql, and from clients in other languages."""

from __future__ import annotations

from outbox.model import limits
from outbox.model.encoding import MAX_BODY_BYTES
from outbox.schema import PREFIX
from outbox.store.dialects.dialect import wake_up_name

#: Written in strings with E, which mean the same whatever standard_conforming_strings says.
_CONTROL = r"\\u0001-\\u001f\\u007f-\\u009f\\u2028\\u2029"
_SPACE = r" \\u00a0\\u1680\\u2000-\\u200a\\u202f\\u205f\\u3000"

#: The parameters of each function besides topic and body.
_FIELDS = """key text DEFAULT NULL, headers json DEFAULT NULL,
    tags text DEFAULT NULL, content_type text DEFAULT NULL, deliver_at timestamptz DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL, wake boolean DEFAULT true"""

_SEND = r"""
CREATE OR REPLACE FUNCTION {where}outbox_send(topic text, body bytea, {fields})
RETURNS uuid LANGUAGE plpgsql AS $function$
DECLARE
    wrong text := CASE
        WHEN topic IS NULL OR topic !~ '^[A-Za-z0-9._%|-]+$' OR length(topic) > {topic} OR topic IN ('.', '..')
            THEN 'topic must be 1 to {topic} characters of [A-Za-z0-9._%|-], not . or ..; rename it'
        WHEN topic = '{half}' THEN 'topic {half} is reserved for half messages; use another topic'
        WHEN body IS NULL THEN 'body must not be null; pass an empty body'
        WHEN octet_length(body) > {body} THEN 'body must be at most {body} bytes; store it elsewhere, send a link'
        WHEN key = '' THEN 'key must not be empty; pass null for a message without order'
        WHEN octet_length(convert_to(key, 'UTF8')) > {key}
            THEN 'key must be at most {key} bytes of UTF-8; hash a longer one'
        WHEN tags = '' THEN 'tags must not be empty; pass null for no tags'
        WHEN length(tags) > {tags} OR tags ~ E'[|{control}]'
            THEN 'tags must be at most {tags} characters without | and control characters; shorten or clean it'
        WHEN length(content_type) > {content_type}
            OR content_type !~ '^[!-~]([ -~]*[!-~])?$'
            THEN 'content_type must be 1 to {content_type} printable ASCII characters; pass a MIME type'
        WHEN NOT (deliver_at > timestamptz '1970-01-01 00:00Z' AND deliver_at < timestamptz '9000-01-01 00:00Z')
            THEN 'deliver_at must lie between the years 1970 and 9000; pass null for no limit'
        WHEN NOT (expires_at > timestamptz '1970-01-01 00:00Z' AND expires_at < timestamptz '9000-01-01 00:00Z')
            THEN 'expires_at must lie between the years 1970 and 9000; pass null for no limit'
        WHEN expires_at <= deliver_at
            THEN 'expires_at must lie after deliver_at, or nobody will ever get the message; move one of them'
        WHEN json_typeof(headers) <> 'object' THEN 'headers must be a JSON object of strings; use json_build_object'
        END;
    pairs text;
    slot bigint;
    id bytea;
BEGIN
    IF wrong IS NULL AND headers IS NOT NULL THEN
        SELECT string_agg(to_json(name)::text || ':' || to_json(value #>> '{{}}')::text, ',' ORDER BY place), CASE
            WHEN bool_or(json_typeof(value) <> 'string')
                THEN 'headers must be a JSON object of strings; cast values to text'
            WHEN bool_or(name !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]+$')
                THEN 'headers: a name is not an HTTP token; use letters, digits and -'
            WHEN bool_or(lower(name) ~ '^(outbox|nats)-')
                THEN 'headers: a name begins with a reserved prefix; use another name'
            WHEN bool_or(lower(name) = 'content-type')
                THEN 'headers: content-type is a field of its own; pass content_type'
            WHEN count(DISTINCT lower(name)) < count(*)
                THEN 'headers must not hold one name in two cases; keep one of them'
            WHEN bool_or(value #>> '{{}}' ~ E'[{control}]|^[{space}]|[{space}]$')
                THEN 'headers must not hold control characters or begin or end with white space; clean the value'
            WHEN count(*) > {headers} THEN 'headers must be at most {headers}; put more into the body'
            WHEN sum(octet_length(convert_to(name || (value #>> '{{}}'), 'UTF8'))) > {header_bytes}
                THEN 'headers must be at most {header_bytes} bytes together; put more into the body'
            END
        INTO pairs, wrong FROM json_each(headers) WITH ORDINALITY AS given(name, value, place);
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF key IS NULL THEN
        slot := floor(random() * {slots});
    ELSE
        -- The first 4 bytes of the SHA-256 of the key.
        slot := ('x' || encode(substring(sha256(convert_to(key, 'UTF8')) FROM 1 FOR 4), 'hex'))::bit(32)::bigint
            % {slots};
    END IF;
    -- A UUID of version 7: 48 bits of milliseconds, the version, random bits.
    id := overlay(uuid_send(gen_random_uuid()) PLACING
        substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6);
    id := set_byte(id, 6, get_byte(id, 6) & 15 | 112);
    INSERT INTO {where}{prefix}message
        (message_id, topic, key, slot, tags, headers, content_type, deliver_at, expires_at, body)
    VALUES (encode(id, 'hex')::uuid, topic, key, slot, tags, '{{' || pairs || '}}', content_type, deliver_at,
            expires_at, body);
    IF wake THEN
        PERFORM pg_notify('{hint}', '');
    END IF;
    RETURN encode(id, 'hex')::uuid;
END
$function$;
"""
_OTHER = """
CREATE OR REPLACE FUNCTION {where}outbox_send(topic text, body {type}, {fields})
RETURNS uuid LANGUAGE sql AS $function$
    SELECT {where}outbox_send(topic, convert_to(body::text, 'UTF8'), key, headers, tags,
        coalesce(content_type, '{content_type}'), deliver_at, expires_at, wake)
$function$;
"""
#: A caller's path would decide which tables the functions find. A session's own tables come last, because they come
#: first where a path does not name them.
_PATH = """
DO $do$
DECLARE
    made regprocedure;
    home text := {home};
    tables text := (
        SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid = to_regclass('{where}{prefix}message'));
BEGIN
    IF tables IS NULL THEN
        RAISE EXCEPTION '{prefix}message is not there; make the tables first, or give --schema';
    END IF;
    FOR made IN
        SELECT p.oid FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE p.proname = 'outbox_send' AND n.nspname = home
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, %I, %I, pg_temp', made, tables, home);
    END LOOP;
END
$do$;
"""
#: The content types of bodies that are no bytes.
_TYPES = {"text": "text/plain", "json": "application/json", "jsonb": "application/json"}


def send_function(schema: str | None, slots: int) -> str:
    """Return the SQL that makes `outbox_send` for the tables in `schema`, for bytes, text and JSON."""
    where = "" if schema is None else f'"{schema}".'
    send = _SEND.format(
        where=where,
        fields=_FIELDS,
        prefix=PREFIX,
        slots=slots,
        hint=wake_up_name(schema),
        control=_CONTROL,
        space=_SPACE,
        half=limits.HALF_TOPIC,
        topic=limits.MAX_TOPIC,
        body=MAX_BODY_BYTES,
        key=limits.MAX_KEY_BYTES,
        tags=limits.MAX_TAGS,
        headers=limits.MAX_HEADERS,
        header_bytes=limits.MAX_HEADER_BYTES,
        content_type=limits.MAX_CONTENT_TYPE,
    )
    others = (
        _OTHER.format(where=where, fields=_FIELDS, type=type, content_type=content_type)
        for type, content_type in _TYPES.items()
    )
    home = "current_schema()" if schema is None else f"'{schema}'"
    return "".join((send, *others, _PATH.format(where=where, prefix=PREFIX, home=home))).lstrip()
