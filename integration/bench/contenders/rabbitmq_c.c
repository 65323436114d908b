/*
 * The benchmark's contender on rabbitmq-c: a publisher with a window of unconfirmed messages, and a consumer.
 *
 *   rabbitmq_c publish|consume --url U --queue Q --messages N [--size B] [--window W] [--prefetch P] [--ack-every K]
 *                              [--warmup M]
 *
 * It prints one line of JSON, the fields of Sample in integration/bench/contender.py, or says on stderr what failed.
 * As in the Python contenders: persistent, mandatory, every confirm matched to its message, also those for many.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>

#if defined(__has_include)
#if __has_include(<rabbitmq-c/amqp.h>)
#define NEW_HEADERS
#endif
#endif
#ifdef NEW_HEADERS
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/tcp_socket.h>
#else
#include <amqp.h>
#include <amqp_tcp_socket.h>
#endif

#define CHANNEL 1
#define FRAME_MAX 131072

struct job {
    char *url;
    const char *queue;
    long messages, size, window, prefetch, ack_every, warmup;
};

struct meter {
    double wall, cpu;
};

struct ledger {
    unsigned char *settled; /* by sequence number */
    long sequence_number;   /* of the last publish */
    long lowest;            /* every number below is settled */
    long outstanding;
};

static void fail(const char *what, const char *why) {
    fprintf(stderr, "rabbitmq-c: %s: %s\n", what, why);
    exit(1);
}

static void check(int status, const char *what) {
    if (status < 0)
        fail(what, amqp_error_string2(status));
}

static void check_reply(amqp_connection_state_t connection, const char *what) {
    amqp_rpc_reply_t reply = amqp_get_rpc_reply(connection);
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION)
        fail(what, amqp_error_string2(reply.library_error));
    if (reply.reply_type != AMQP_RESPONSE_NORMAL)
        fail(what, "the broker refused");
}

static double wall_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* Not ru_maxrss, which starts at the peak of the process that spawned this one. */
static long peak_rss_bytes(void) {
    char line[256];
    long kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %ld", &kilobytes) == 1)
            break;
    if (status)
        fclose(status);
    return kilobytes * 1024;
}

static struct meter start(void) {
    struct meter meter = {wall_seconds(), cpu_seconds()};
    return meter;
}

static void stop_and_print(struct meter begun, long messages) {
    double wall = wall_seconds() - begun.wall, cpu = cpu_seconds() - begun.cpu;
    printf("{\"messages\": %ld, \"wall_seconds\": %.6f, \"cpu_seconds\": %.6f, \"peak_rss_bytes\": %ld}\n", messages, wall,
           cpu, peak_rss_bytes());
    fflush(stdout);
}

static amqp_connection_state_t open_channel(const struct job *job) {
    struct amqp_connection_info info;
    amqp_connection_state_t connection = amqp_new_connection();
    amqp_socket_t *socket = amqp_tcp_socket_new(connection);
    amqp_rpc_reply_t reply;

    amqp_default_connection_info(&info);
    check(amqp_parse_url(job->url, &info), "url");
    if (!socket)
        fail("socket", "out of memory");
    check(amqp_socket_open(socket, info.host, info.port), "connect");
    reply = amqp_login(connection, info.vhost, 0, FRAME_MAX, 0, AMQP_SASL_METHOD_PLAIN, info.user, info.password);
    if (reply.reply_type != AMQP_RESPONSE_NORMAL)
        fail("login", "refused");
    amqp_channel_open(connection, CHANNEL);
    check_reply(connection, "channel.open");
    return connection;
}

/* publishing */

static void settle(struct ledger *ledger, long tag, int multiple) {
    for (long number = multiple ? ledger->lowest : tag; number <= tag; number++) {
        ledger->outstanding -= !ledger->settled[number];
        ledger->settled[number] = 1;
    }
    while (ledger->lowest <= ledger->sequence_number && ledger->settled[ledger->lowest])
        ledger->lowest++;
}

static void take(struct ledger *ledger, const amqp_frame_t *frame) {
    const amqp_basic_ack_t *ack;
    if (frame->frame_type != AMQP_FRAME_METHOD)
        return;
    if (frame->payload.method.id != AMQP_BASIC_ACK_METHOD)
        fail("confirm", amqp_method_name(frame->payload.method.id));
    ack = frame->payload.method.decoded;
    settle(ledger, (long)ack->delivery_tag, ack->multiple);
}

/* Wait for a confirm, and take all others that have come. */
static void take_confirms(amqp_connection_state_t connection, struct ledger *ledger) {
    struct timeval now = {0, 0};
    amqp_frame_t frame;
    int status;
    check(amqp_simple_wait_frame(connection, &frame), "confirm");
    take(ledger, &frame);
    while ((status = amqp_simple_wait_frame_noblock(connection, &frame, &now)) == AMQP_STATUS_OK)
        take(ledger, &frame);
    if (status != AMQP_STATUS_TIMEOUT)
        check(status, "confirm");
    amqp_maybe_release_buffers(connection);
}

static void publish(amqp_connection_state_t connection, const struct job *job, struct ledger *ledger, amqp_bytes_t body,
                    long count) {
    amqp_bytes_t queue = amqp_cstring_bytes(job->queue);
    amqp_basic_properties_t persistent = {0};
    long last = ledger->sequence_number + count;

    persistent._flags = AMQP_BASIC_DELIVERY_MODE_FLAG;
    persistent.delivery_mode = AMQP_DELIVERY_PERSISTENT;
    while (ledger->sequence_number < last || ledger->outstanding) {
        while (ledger->sequence_number < last && ledger->outstanding < job->window) {
            ledger->sequence_number++;
            ledger->outstanding++;
            check(amqp_basic_publish(connection, CHANNEL, amqp_empty_bytes, queue, 1, 0, &persistent, body), "publish");
        }
        take_confirms(connection, ledger);
    }
}

static void run_publisher(const struct job *job) {
    amqp_connection_state_t connection = open_channel(job);
    struct ledger ledger = {calloc(job->warmup + job->messages + 1, 1), 0, 1, 0};
    amqp_bytes_t body = amqp_bytes_malloc(job->size);
    struct meter begun;

    if (!ledger.settled || !body.bytes)
        fail("memory", "exhausted");
    memset(body.bytes, 'x', body.len);
    amqp_confirm_select(connection, CHANNEL);
    check_reply(connection, "confirm.select");
    publish(connection, job, &ledger, body, job->warmup);
    begun = start();
    publish(connection, job, &ledger, body, job->messages);
    stop_and_print(begun, job->messages);
    amqp_connection_close(connection, AMQP_REPLY_SUCCESS);
}

/* consuming */

static void run_consumer(const struct job *job) {
    amqp_connection_state_t connection = open_channel(job);
    struct meter begun = {0, 0};

    amqp_basic_qos(connection, CHANNEL, 0, (uint16_t)job->prefetch, 0);
    check_reply(connection, "basic.qos");
    amqp_basic_consume(connection, CHANNEL, amqp_cstring_bytes(job->queue), amqp_empty_bytes, 0, 0, 0, amqp_empty_table);
    check_reply(connection, "basic.consume");
    for (long count = 1; count <= job->messages; count++) {
        amqp_envelope_t envelope;
        amqp_rpc_reply_t reply;
        amqp_maybe_release_buffers(connection);
        reply = amqp_consume_message(connection, &envelope, NULL, 0);
        if (reply.reply_type != AMQP_RESPONSE_NORMAL)
            fail("delivery", "the connection or the channel is gone");
        if (count == 1)
            begun = start();
        if (count % job->ack_every == 0 || count == job->messages)
            check(amqp_basic_ack(connection, CHANNEL, envelope.delivery_tag, 1), "ack");
        amqp_destroy_envelope(&envelope);
    }
    stop_and_print(begun, job->messages);
    amqp_connection_close(connection, AMQP_REPLY_SUCCESS);
}

/* command line */

static long *number_option(struct job *job, const char *name) {
    struct {
        const char *name;
        long *value;
    } options[] = {
        {"--messages", &job->messages}, {"--size", &job->size},           {"--window", &job->window},
        {"--prefetch", &job->prefetch}, {"--ack-every", &job->ack_every}, {"--warmup", &job->warmup},
    };
    for (size_t index = 0; index < sizeof options / sizeof *options; index++)
        if (!strcmp(name, options[index].name))
            return options[index].value;
    fail(name, "no such option");
    return NULL;
}

int main(int argc, char **argv) {
    struct job job = {NULL, "", 0, 1024, 2000, 300, 100, 0};
    for (int index = 2; index + 1 < argc; index += 2) {
        if (!strcmp(argv[index], "--url"))
            job.url = argv[index + 1];
        else if (!strcmp(argv[index], "--queue"))
            job.queue = argv[index + 1];
        else
            *number_option(&job, argv[index]) = atol(argv[index + 1]);
    }
    if (argc < 2 || !job.url || job.messages < 1)
        fail("usage", "publish|consume --url U --queue Q --messages N ...");
    if (!strcmp(argv[1], "publish"))
        run_publisher(&job);
    else
        run_consumer(&job);
    return 0;
}
